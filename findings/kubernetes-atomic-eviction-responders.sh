#!/usr/bin/env bash
# Kubernetes 1.37.2: no MutatingAdmissionPolicy with ApplyConfiguration can add an eviction responder.
#
# `spec.evictionResponders` of a pod is a list that is merged by `name`, like `spec.containers`. But
# each of its items is an atomic struct, and ApplyConfiguration refuses whatever contains one, also
# where nothing is overwritten. With `failurePolicy: Ignore` the pod is then created without the
# responder, and nobody is told: no warning, no Event, no status of the policy. With Fail no pod can be
# created. A policy with JSONPatch can add one. A container can be added by ApplyConfiguration.
#
# This applies both patches with the function of Kubernetes' own admission plugin.
#
# Seen: "a container: added" and "a responder: invalid ApplyConfiguration: may not mutate atomic arrays,
# maps or structs: .spec.evictionResponders[0]"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export GOFLAGS=-mod=mod GOWORK=off
cat >main.go <<'GO'
package main

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating/patch"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
)

func try(what string, spec map[string]any) {
	pod := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{{Name: "first", Image: "x"}}}}
	pod.APIVersion, pod.Kind = "v1", "Pod"
	change := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Pod", "spec": spec}}
	_, err := patch.ApplyStructuredMergeDiff(applyconfigurations.NewTypeConverter(scheme.Scheme), pod, change)
	if err != nil {
		fmt.Printf("%s: %v\n", what, err)
		return
	}
	fmt.Printf("%s: added\n", what)
}

func main() {
	named := map[string]any{"name": "second", "image": "x"}
	try("a container", map[string]any{"containers": []any{named}})
	responder := map[string]any{"name": "example.com/hold", "priority": int64(20000)}
	try("a responder", map[string]any{"evictionResponders": []any{responder}})
}
GO
go mod init finding 2>/dev/null
go get k8s.io/apiserver@v0.37.2 k8s.io/client-go@v0.37.2 k8s.io/api@v0.37.2 2>/dev/null
seen=$(go run .)
echo "$seen"
expected='a container: added
a responder: invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: .spec.evictionResponders[0]'
[ "$seen" = "$expected" ]
