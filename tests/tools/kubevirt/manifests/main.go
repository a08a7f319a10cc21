// Command manifests prints, as one JSON list, objects that virt-operator would install for
// virt-api, virt-controller and virt-handler: service accounts, their roles and bindings, webhooks
// and API services.
package main

import (
	"encoding/json"
	"log"
	"os"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"

	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/rbac"
)

const namespace = "kubevirt"

func main() {
	objects := slices.Concat(
		rbac.GetAllCluster(),
		rbac.GetAllApiServer(namespace),
		rbac.GetAllController(namespace, false),
		rbac.GetAllHandler(namespace),
		[]runtime.Object{
			components.NewVirtAPIMutatingWebhookConfiguration(namespace),
			components.NewVirtAPIValidatingWebhookConfiguration(namespace),
		},
	)
	for _, service := range components.NewVirtAPIAPIServices(namespace) {
		objects = append(objects, service)
	}
	if err := json.NewEncoder(os.Stdout).Encode(objects); err != nil {
		log.Fatal(err)
	}
}
