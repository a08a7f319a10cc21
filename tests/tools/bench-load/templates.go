package main

import "strings"

// Objects as KubeVirt 1.8 and the API server write them, with made-up values; compact joins the
// lines.

const migrationConfiguration = `{"allowAutoConverge":false,"allowPostCopy":false,"allowWorkloadDisruption":false,"bandwidthPerMigration":"0","completionTimeoutPerGiB":150,"nodeDrainTaintKey":"kubevirt.io/drain","parallelMigrationsPerCluster":5,"parallelOutboundMigrationsPerNode":2,"progressTimeout":150,"unsafeMigrationOverride":false}`

const vmiJSON = `{"apiVersion":"kubevirt.io/v1","kind":"VirtualMachineInstance","metadata":{
"annotations":{"kubevirt.io/cluster-instancetype-name":"u1.medium","kubevirt.io/cluster-preference-name":"fedora",
"kubevirt.io/latest-observed-api-version":"v1","kubevirt.io/storage-observed-api-version":"v1",
"kubevirt.io/vm-generation":"3","vm.kubevirt.io/flavor":"medium","vm.kubevirt.io/os":"fedora","vm.kubevirt.io/workload":"server"},
"creationTimestamp":"${created}","finalizers":["kubevirt.io/virtualMachineControllerFinalize","foregroundDeleteVirtualMachine"],
"generation":27,"labels":{"app":"${name}","kubevirt.io/domain":"${name}","kubevirt.io/nodeName":"${node}","kubevirt.io/size":"medium",
"network.kubevirt.io/headlessService":"headless","vm.kubevirt.io/name":"${name}","vm.kubevirt.io/template":"fedora-server-medium"},
${managed}
"name":"${name}","namespace":"${namespace}","ownerReferences":[{"apiVersion":"kubevirt.io/v1","blockOwnerDeletion":true,"controller":true,
"kind":"VirtualMachine","name":"${name}","uid":"${pod}"}],"resourceVersion":"${version}","uid":"${uid}"},
"spec":{"architecture":"amd64","domain":{"cpu":{"cores":1,"maxSockets":4,"model":"host-model","sockets":1,"threads":1},
"devices":{"autoattachPodInterface":false,"disks":[{"disk":{"bus":"virtio"},"name":"rootdisk"},{"disk":{"bus":"virtio"},"name":"cloudinitdisk"}],
"interfaces":[{"macAddress":"02:3a:9c:00:00:2f","masquerade":{},"model":"virtio","name":"default"}],"rng":{}},
"features":{"acpi":{"enabled":true},"smm":{"enabled":true}},"firmware":{"bootloader":{"efi":{"secureBoot":false}},
"uuid":"${pod}"},"machine":{"type":"q35"},"memory":{"guest":"4Gi","maxGuest":"16Gi"},"resources":{"requests":{"memory":"4Gi"}}},
"evictionStrategy":"LiveMigrate","networks":[{"name":"default","pod":{}}],"subdomain":"headless","terminationGracePeriodSeconds":180,
"volumes":[{"dataVolume":{"name":"${name}-root"},"name":"rootdisk"},{"cloudInitNoCloud":{"secretRef":{"name":"${name}-cloudinit"}},"name":"cloudinitdisk"}]},
"status":{"activePods":{"${pod}":"${node}"},"conditions":[
{"lastProbeTime":null,"lastTransitionTime":"${created}","status":"True","type":"Ready"},
{"lastProbeTime":null,"lastTransitionTime":null,"message":"All of the VMI's DVs are bound and ready","reason":"AllDVsReady","status":"True","type":"DataVolumesReady"},
{"lastProbeTime":null,"lastTransitionTime":null,"status":"True","type":"LiveMigratable"},
{"lastProbeTime":null,"lastTransitionTime":null,"status":"True","type":"StorageLiveMigratable"},
{"lastProbeTime":"${created}","lastTransitionTime":null,"status":"True","type":"AgentConnected"}],
"currentCPUTopology":{"cores":1,"sockets":1,"threads":1},
"guestOSInfo":{"id":"fedora","kernelRelease":"6.8.5-301.fc40.x86_64","kernelVersion":"#1 SMP PREEMPT_DYNAMIC Thu Apr 11 20:00:10 UTC 2024",
"machine":"x86_64","name":"Fedora Linux","prettyName":"Fedora Linux 40 (Cloud Edition)","version":"40 (Cloud Edition)","versionId":"40"},
"interfaces":[{"infoSource":"domain, guest-agent","interfaceName":"eth0","ipAddress":"10.128.2.31","ipAddresses":["10.128.2.31","fd02:0:0:3::1f"],
"linkState":"up","mac":"02:3a:9c:00:00:2f","name":"default","podInterfaceName":"eth0","queueCount":1}],
"launcherContainerImageVersion":"quay.io/kubevirt/virt-launcher@sha256:5d6c1a5b9b44e5e0a8a1ce8de4d5d8a4a9f3f1a4f0b2c6d7e8f90a1b2c3d4e5f",
"machine":{"type":"pc-q35-rhel9.4.0"},"memory":{"guestAtBoot":"4Gi","guestCurrent":"4Gi","guestRequested":"4Gi"},
"migrationMethod":"BlockMigration",${migration}"migrationTransport":"Unix","nodeName":"${node}","phase":"Running",
"phaseTransitionTimestamps":[{"phase":"Pending","phaseTransitionTimestamp":"${created}"},{"phase":"Scheduling","phaseTransitionTimestamp":"${created}"},
{"phase":"Scheduled","phaseTransitionTimestamp":"${created}"},{"phase":"Running","phaseTransitionTimestamp":"${created}"}],
"qosClass":"Burstable","runtimeUser":107,"selinuxContext":"system_u:object_r:container_file_t:s0:c24,c519",
"virtualMachineRevisionName":"revision-start-vm-${pod}-3",
"volumeStatus":[{"name":"cloudinitdisk","size":1048576,"target":"vdb"},
{"name":"rootdisk","persistentVolumeClaimInfo":{"accessModes":["ReadWriteMany"],"capacity":{"storage":"34144990004"},"claimName":"${name}-root",
"filesystemOverhead":"0","volumeMode":"Block"},"target":"vda"}]}}`

const vmiManaged = `"managedFields":[{"apiVersion":"kubevirt.io/v1","fieldsType":"FieldsV1","fieldsV1":{"f:metadata":{"f:annotations":{".":{},
"f:kubevirt.io/cluster-instancetype-name":{},"f:kubevirt.io/latest-observed-api-version":{},"f:kubevirt.io/storage-observed-api-version":{},"f:kubevirt.io/vm-generation":{}},
"f:finalizers":{".":{},"v:\"kubevirt.io/virtualMachineControllerFinalize\"":{}},"f:labels":{".":{},"f:kubevirt.io/domain":{},"f:kubevirt.io/nodeName":{},"f:kubevirt.io/size":{}},
"f:ownerReferences":{".":{},"k:{\"uid\":\"${pod}\"}":{}}},"f:spec":{".":{},"f:architecture":{},"f:domain":{".":{},
"f:cpu":{".":{},"f:cores":{},"f:maxSockets":{},"f:model":{},"f:sockets":{},"f:threads":{}},"f:devices":{".":{},"f:autoattachPodInterface":{},"f:disks":{},"f:interfaces":{},"f:rng":{}},
"f:features":{".":{},"f:acpi":{".":{},"f:enabled":{}},"f:smm":{".":{},"f:enabled":{}}},"f:firmware":{".":{},"f:uuid":{}},"f:machine":{".":{},"f:type":{}},
"f:memory":{".":{},"f:guest":{},"f:maxGuest":{}},"f:resources":{".":{},"f:requests":{".":{},"f:memory":{}}}},"f:evictionStrategy":{},"f:networks":{},
"f:terminationGracePeriodSeconds":{},"f:volumes":{}},"f:status":{".":{},"f:activePods":{".":{},"f:${pod}":{}},"f:conditions":{},"f:currentCPUTopology":{},
"f:guestOSInfo":{},"f:interfaces":{},"f:launcherContainerImageVersion":{},"f:memory":{},"f:migrationMethod":{},"f:migrationState":{},"f:migrationTransport":{},"f:nodeName":{},"f:phase":{},
"f:phaseTransitionTimestamps":{},"f:qosClass":{},"f:runtimeUser":{},"f:virtualMachineRevisionName":{},"f:volumeStatus":{}}},
"manager":"virt-controller","operation":"Update","time":"${created}"}],`

const vmimJSON = `{"apiVersion":"kubevirt.io/v1","kind":"VirtualMachineInstanceMigration","metadata":{
"annotations":{"kubevirt.io/evacuationMigration":"${node}","kubevirt.io/latest-observed-api-version":"v1","kubevirt.io/storage-observed-api-version":"v1"},
"creationTimestamp":"${began}","generateName":"kubevirt-evacuation-","generation":1,"labels":{"kubevirt.io/vmi-name":"${name}"},
${managed}
"name":"${vmim}","namespace":"${namespace}","resourceVersion":"${version}","uid":"${uid}"},
"spec":{"priority":"system-critical","vmiName":"${name}"},
"status":{"migrationState":{"completed":true,"endTimestamp":"${ended}","migrationConfiguration":` + migrationConfiguration + `,
"migrationUid":"${uid}","mode":"PreCopy","sourceNode":"worker-201","sourcePod":"virt-launcher-${name}-x7x7x","startTimestamp":"${started}",
"targetDirectMigrationNodePorts":{"36411":49152,"40247":0,"42159":49153},"targetNode":"${node}","targetNodeAddress":"10.128.2.17",
"targetNodeDomainDetected":true,"targetNodeDomainReadyTimestamp":"${started}","targetPod":"virt-launcher-${name}-q9q9q"},
"phase":"Succeeded","phaseTransitionTimestamps":[{"phase":"Pending","phaseTransitionTimestamp":"${began}"},{"phase":"Scheduling","phaseTransitionTimestamp":"${began}"},
{"phase":"Scheduled","phaseTransitionTimestamp":"${began}"},{"phase":"PreparingTarget","phaseTransitionTimestamp":"${began}"},{"phase":"TargetReady","phaseTransitionTimestamp":"${started}"},
{"phase":"Running","phaseTransitionTimestamp":"${started}"},{"phase":"Succeeded","phaseTransitionTimestamp":"${ended}"}]}}`

const failureJSON = `{"type":"ADDED","object":{"apiVersion":"kubevirt.io/v1","kind":"VirtualMachineInstanceMigration","metadata":{` +
	`"name":"kubevirt-evacuation-%s","namespace":"team-%d","uid":"%s","creationTimestamp":"%s","resourceVersion":"%d",` +
	`"annotations":{"kubevirt.io/evacuationMigration":"worker-%d"}},"spec":{"vmiName":"vm-%d"},"status":{"phase":"Failed","phaseTransitionTimestamps":[` +
	`{"phase":"Pending","phaseTransitionTimestamp":"%s"},{"phase":"Scheduling","phaseTransitionTimestamp":"%s"},` +
	`{"phase":"Failed","phaseTransitionTimestamp":"%s"}]}}}` + "\n"

const vmimManaged = `"managedFields":[{"apiVersion":"kubevirt.io/v1","fieldsType":"FieldsV1","fieldsV1":{"f:metadata":{"f:annotations":{".":{},"f:kubevirt.io/evacuationMigration":{}},
"f:generateName":{},"f:labels":{".":{},"f:kubevirt.io/vmi-name":{}}},"f:spec":{".":{},"f:priority":{},"f:vmiName":{}}},"manager":"virt-controller","operation":"Update","time":"${began}"},
{"apiVersion":"kubevirt.io/v1","fieldsType":"FieldsV1","fieldsV1":{"f:status":{".":{},"f:migrationState":{".":{},"f:completed":{},"f:endTimestamp":{},"f:migrationConfiguration":{},
"f:migrationUid":{},"f:mode":{},"f:sourceNode":{},"f:sourcePod":{},"f:startTimestamp":{},"f:targetNode":{},"f:targetPod":{}},"f:phase":{},"f:phaseTransitionTimestamps":{}}},
"manager":"virt-controller","operation":"Update","subresource":"status","time":"${ended}"}],`

const podJSON = `{"apiVersion":"v1","kind":"Pod","metadata":{"annotations":{"kubevirt.io/domain":"${name}",
"descheduler.alpha.kubernetes.io/request-evict-only":"","kubevirt.io/migrationTransportUnix":"true"},
"creationTimestamp":"${created}","labels":{"kubevirt.io":"virt-launcher","kubevirt.io/created-by":"${uid}","kubevirt.io/nodeName":"${node}","vm.kubevirt.io/name":"${name}"},
"name":"virt-launcher-${name}-q9q9q","namespace":"${namespace}","resourceVersion":"${version}","uid":"${pod}"},
"spec":{"containers":[{"name":"compute","image":"quay.io/kubevirt/virt-launcher:v1.8.4","resources":{"requests":{"cpu":"100m","memory":"4468Mi"}}}],
"nodeName":"${node}","restartPolicy":"Never"},
"status":{"conditions":[{"status":"True","type":"Ready"},{"status":"True","type":"PodScheduled"}],"phase":"Running"}}`

const kubevirtJSON = `{"apiVersion":"kubevirt.io/v1","kind":"KubeVirt","metadata":{"name":"kubevirt","namespace":"kubevirt","resourceVersion":"1","uid":"kv"},
"spec":{"configuration":{"evictionStrategy":"LiveMigrate","migrations":{"parallelMigrationsPerCluster":5,"parallelOutboundMigrationsPerNode":2}}}}`

// A node as the kubelet writes it, with its fifty largest images.
var nodeJSON = `{"apiVersion":"v1","kind":"Node","metadata":{"annotations":{"volumes.kubernetes.io/controller-managed-attach-detach":"true"},
"creationTimestamp":"${created}","labels":{"kubernetes.io/arch":"amd64","kubernetes.io/hostname":"${node}","kubernetes.io/os":"linux","kubevirt.io/schedulable":"true"},
"name":"${node}","resourceVersion":"${version}","uid":"${uid}"},"spec":{${spec}"podCIDR":"10.244.0.0/24"},
"status":{"addresses":[{"address":"10.0.0.1","type":"InternalIP"},{"address":"${node}","type":"Hostname"}],
"allocatable":{"cpu":"95500m","memory":"526000000Ki","pods":"250"},"capacity":{"cpu":"96","memory":"528000000Ki","pods":"250"},
"conditions":[` + nodeConditionJSON + `DiskPressure"},` + nodeConditionJSON + `MemoryPressure"},` + nodeConditionJSON + `Ready"}],
"images":[` + strings.Repeat(nodeImageJSON+",", 49) + nodeImageJSON + `],
"nodeInfo":{"architecture":"amd64","containerRuntimeVersion":"containerd://2.1.4","kernelVersion":"6.12.0","kubeletVersion":"v1.37.2","operatingSystem":"linux"}}}`

const nodeConditionJSON = `{"lastHeartbeatTime":"${now}","lastTransitionTime":"${created}","message":"what the kubelet says of it","reason":"KubeletReady","status":"False","type":"`

const nodeImageJSON = `{"names":["quay.io/kubevirt/part@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08","quay.io/kubevirt/part:v1.9.0"],"sizeBytes":104857600}`
