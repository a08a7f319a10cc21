"""All of KubeVirt, with libvirt and QEMU, on two real nodes: `make test-vms`."""
