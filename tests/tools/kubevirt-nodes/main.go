// Command operator prints, as one JSON list, the objects that install virt-operator, as in
// KubeVirt's release manifest.
package main

import (
	"encoding/json"
	"log"
	"os"
	"runtime/debug"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/rbac"
)

const (
	namespace = "kubevirt"
	registry  = "localhost/kubevirt"
	// The two images of tests/vms/images.py. The first one has virt-launcher and virt-handler, and
	// runs as root. The second one has the other programs, and runs as another user.
	asRoot = registry + "/virt-launcher:1"
	asUser = registry + "/virt-operator:1"
)

func main() {
	crd, err := components.NewKubeVirtCrd()
	if err != nil {
		log.Fatal(err)
	}
	version := kubevirtVersion()
	operator := components.NewOperatorDeployment(namespace, registry, "", version, "2", version, "",
		asUser, asUser, asRoot, asRoot, asUser, asUser, asUser, asUser, asUser, asUser, asUser, asUser, asUser,
		corev1.PullNever)
	replicas := int32(1)
	operator.Spec.Replicas = &replicas
	objects := []any{
		&corev1.Namespace{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{
				Name:   namespace,
				Labels: map[string]string{"kubevirt.io": "", "pod-security.kubernetes.io/enforce": "privileged"},
			},
		},
		&schedulingv1.PriorityClass{
			TypeMeta:   metav1.TypeMeta{APIVersion: "scheduling.k8s.io/v1", Kind: "PriorityClass"},
			ObjectMeta: metav1.ObjectMeta{Name: "kubevirt-cluster-critical"},
			Value:      1000000000,
		},
		crd,
	}
	objects = append(objects, rbac.GetAllOperator(namespace)...)
	objects = append(objects, operator)
	list := map[string]any{"apiVersion": "v1", "kind": "List", "items": objects}
	if err := json.NewEncoder(os.Stdout).Encode(list); err != nil {
		log.Fatal(err)
	}
}

// kubevirtVersion is the version of KubeVirt that this program was built from.
func kubevirtVersion() string {
	info, ok := debug.ReadBuildInfo()
	if ok {
		for _, module := range info.Deps {
			if module.Path == "kubevirt.io/kubevirt" {
				return module.Version
			}
		}
	}
	log.Fatal("built without kubevirt.io/kubevirt")
	return ""
}
