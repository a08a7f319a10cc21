#!/usr/bin/env bash
# KubeVirt 1.9.0, go-restful 3.13.0: `evacuate/cancel` answers 406 to a client that accepts only JSON.
#
# With `Accept: application/json`, `PUT .../virtualmachineinstances/NAME/evacuate/cancel` gets
# `406 Not Acceptable`. kubectl adds `*/*`, and so works. The route declares no `Produces`, and go-restful does not read that as "any
# type", as it does where a route declares no `Consumes`: it then matches nothing but `*/*`. Seen on
# virt-api 1.9.0 behind kube-apiserver 1.37.2.
#
# This asks go-restful, with a route declared as KubeVirt declares it, and reads KubeVirt's route.
#
# Seen: "*/*: 200", "application/json: 406", "application/json, */*: 200", and
# "Produces in KubeVirt's route: 0"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export GOFLAGS=-mod=mod GOWORK=off
cat >main.go <<'GO'
package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/emicklei/go-restful/v3"
)

func main() {
	service := new(restful.WebService)
	done := func(_ *restful.Request, response *restful.Response) { response.WriteHeader(http.StatusOK) }
	service.Route(service.PUT("/cancel").To(done).Consumes("*/*").Returns(http.StatusOK, "OK", ""))
	container := restful.NewContainer()
	container.Add(service)
	for _, accepted := range []string{"*/*", "application/json", "application/json, */*"} {
		request := httptest.NewRequest(http.MethodPut, "/cancel", nil)
		request.Header.Set("Accept", accepted)
		response := httptest.NewRecorder()
		container.ServeHTTP(response, request)
		fmt.Printf("%s: %d\n", accepted, response.Code)
	}
}
GO
go mod init finding 2>/dev/null
go get github.com/emicklei/go-restful/v3@v3.13.0 2>/dev/null
seen=$(go run .)
source=$(GOTOOLCHAIN=auto go mod download -json kubevirt.io/kubevirt@v1.9.0 | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
route=$(sed -n '/PUT(.*subresourcesvmiGVR.*"evacuate\/cancel"/,/^$/p' "$source/pkg/virt-api/api.go")
grep -q "EvacuateCancelHandler" <<<"$route"
seen="$seen
Produces in KubeVirt's route: $(grep -c "Produces(" <<<"$route" || true)"
echo "$seen"
expected="*/*: 200
application/json: 406
application/json, */*: 200
Produces in KubeVirt's route: 0"
[ "$seen" = "$expected" ]
