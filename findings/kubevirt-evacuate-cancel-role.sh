#!/usr/bin/env bash
# KubeVirt 1.9.0, Kubernetes 1.37.2: KubeVirt's roles admin and edit cannot cancel an evacuation.
#
# Both list `virtualmachineinstances/evacuate/cancel`, and so virt-api checks the request. But the API
# server in front of it authorizes only the first part after the object's name, here `evacuate`, which
# no role of KubeVirt lists. So `PUT .../virtualmachineinstances/NAME/evacuate/cancel` is refused with
# 403, `cannot update resource "virtualmachineinstances/evacuate"`, for everybody but a cluster-admin. A
# role that lists only `evacuate` gets 401 from virt-api; one that lists both may cancel.
#
# This asks Kubernetes' own parser what it authorizes, and reads what KubeVirt's roles list.
#
# Seen: "authorized: update virtualmachineinstances/evacuate" and
# "in KubeVirt's roles: virtualmachineinstances/evacuate/cancel"
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

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

func main() {
	parser := request.RequestInfoFactory{APIPrefixes: sets.NewString("apis", "api"), GrouplessAPIPrefixes: sets.NewString("api")}
	path := "/apis/subresources.kubevirt.io/v1/namespaces/ns/virtualmachineinstances/vm/evacuate/cancel"
	asked, err := http.NewRequest(http.MethodPut, "https://cluster.example"+path, nil)
	if err != nil {
		panic(err)
	}
	info, err := parser.NewRequestInfo(asked)
	if err != nil {
		panic(err)
	}
	fmt.Printf("authorized: %s %s/%s\n", info.Verb, info.Resource, info.Subresource)
}
GO
go mod init finding 2>/dev/null
go get k8s.io/apiserver@v0.37.2 k8s.io/apimachinery@v0.37.2 2>/dev/null
seen=$(go run .)
roles=$(GOTOOLCHAIN=auto go mod download -json kubevirt.io/kubevirt@v1.9.0 | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
seen="$seen
in KubeVirt's roles: $(grep -rhoE '"virtualmachineinstances/evacuate[a-z/]*"' "$roles/pkg/virt-operator/resource/generate/rbac" --include='*.go' --exclude='*_test.go' | tr -d '"')"
echo "$seen"
expected="authorized: update virtualmachineinstances/evacuate
in KubeVirt's roles: virtualmachineinstances/evacuate/cancel"
[ "$seen" = "$expected" ]
