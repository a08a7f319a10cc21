// Command crds prints KubeVirt's own CRDs as one JSON list.
package main

import (
	"encoding/json"
	"log"
	"os"

	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"

	extv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// All CRDs are needed, because virt-controller waits until its informers for all of them have
// synced.
var constructors = []func() (*extv1.CustomResourceDefinition, error){
	components.NewVirtualMachineInstanceCrd,
	components.NewVirtualMachineCrd,
	components.NewPresetCrd,
	components.NewReplicaSetCrd,
	components.NewVirtualMachineInstanceMigrationCrd,
	components.NewKubeVirtCrd,
	components.NewVirtualMachinePoolCrd,
	components.NewVirtualMachineSnapshotCrd,
	components.NewVirtualMachineSnapshotContentCrd,
	components.NewVirtualMachineRestoreCrd,
	components.NewVirtualMachineExportCrd,
	components.NewVirtualMachineBackupCrd,
	components.NewVirtualMachineBackupTrackerCrd,
	components.NewVirtualMachineInstancetypeCrd,
	components.NewVirtualMachineClusterInstancetypeCrd,
	components.NewVirtualMachinePreferenceCrd,
	components.NewVirtualMachineClusterPreferenceCrd,
	components.NewMigrationPolicyCrd,
	components.NewVirtualMachineCloneCrd,
}

func main() {
	crds := make([]*extv1.CustomResourceDefinition, 0, len(constructors))
	for _, construct := range constructors {
		crd, err := construct()
		if err != nil {
			log.Fatal(err)
		}
		crds = append(crds, crd)
	}
	if err := json.NewEncoder(os.Stdout).Encode(crds); err != nil {
		log.Fatal(err)
	}
}
