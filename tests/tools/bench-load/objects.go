package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

const (
	vmis       = "virtualmachineinstances"
	vmims      = "virtualmachineinstancemigrations"
	pods       = "pods"
	kubevirts  = "kubevirts"
	allNodes   = "nodes"
	namespaces = 50
	nodes      = 100
)

// A template is JSON with ${names}. It is split at the names only once, so that rendering is fast.
type template struct {
	text []string
	name []string
}

func cut(source string) template {
	var t template
	for {
		before, after, found := strings.Cut(source, "${")
		t.text = append(t.text, before)
		if !found {
			return t
		}
		name, rest, _ := strings.Cut(after, "}")
		t.name = append(t.name, name)
		source = rest
	}
}

func (t template) append(to []byte, value func([]byte, string) []byte) []byte {
	for i, text := range t.text {
		to = append(to, text...)
		if i < len(t.name) {
			to = value(to, t.name[i])
		}
	}
	return to
}

// compact removes the line breaks, which only make the templates readable.
func compact(source string) string {
	var out strings.Builder
	for _, line := range strings.Split(source, "\n") {
		out.WriteString(strings.TrimSpace(line))
	}
	return out.String()
}

// A cluster computes each object from its number, and stores only what events have changed.
type cluster struct {
	vmis    int
	each    int // VMIMs per VMI
	pods    bool
	cooling int // how many of 1,000 VMIs migrated in the last ten minutes; the others did a week ago or earlier
	nodes   int // Node objects, of which the first 1 % are cordoned
	managed int // the VMIs and VMIMs whose numbers are multiples of this have managedFields
	started time.Time
	version int64
	turns   []int32 // how often a VMI began or ended a migration since the start
	bare    [2]template
	full    [2]template
	pod     template
	node    template
}

func newCluster(count, each, cooling, nodes, managed int, withPods bool) *cluster {
	return &cluster{
		vmis:    count,
		each:    each,
		pods:    withPods,
		cooling: cooling,
		nodes:   nodes,
		managed: managed,
		started: time.Now().UTC(),
		version: 1_000_000,
		turns:   make([]int32, count),
		bare:    [2]template{cut(compact(strings.ReplaceAll(vmiJSON, "${managed}", ""))), cut(compact(strings.ReplaceAll(vmimJSON, "${managed}", "")))},
		full:    [2]template{cut(compact(strings.ReplaceAll(vmiJSON, "${managed}", vmiManaged))), cut(compact(strings.ReplaceAll(vmimJSON, "${managed}", vmimManaged)))},
		pod:     cut(compact(podJSON)),
		node:    cut(compact(nodeJSON)),
	}
}

func (c *cluster) count(resource string) int {
	switch resource {
	case vmis:
		return c.vmis
	case vmims:
		return c.vmis * c.each
	case pods:
		if c.pods {
			return c.vmis
		}
		return 0
	case allNodes:
		return c.nodes
	default:
		return 1
	}
}

// append renders one object of a resource.
func (c *cluster) append(to []byte, resource string, i int) []byte {
	switch resource {
	case vmis:
		return c.appendVMI(to, i)
	case vmims:
		return c.appendVMIM(to, i)
	case pods:
		return c.pod.append(to, func(to []byte, name string) []byte { return c.appendValue(to, i, name) })
	case allNodes:
		return c.node.append(to, func(to []byte, name string) []byte { return c.appendNodeValue(to, i, name) })
	default:
		return append(to, compact(kubevirtJSON)...)
	}
}

// kind picks the template of a VMI or VMIM: with managedFields, or without.
func (c *cluster) kind(resource, i int) template {
	if i%c.managed == 0 {
		return c.full[resource]
	}
	return c.bare[resource]
}

// ended returns the end of a VMI's migration; n is 0 for the latest, 1 for the one before it.
func (c *cluster) ended(i, n int) time.Time {
	last := 7*24*time.Hour + time.Duration(i)*7*time.Second
	if i%1000 < c.cooling {
		last = time.Duration(i%600) * time.Second
	}
	return c.started.Add(-last - time.Duration(n)*2*time.Hour).Truncate(time.Second)
}

func (c *cluster) appendVMI(to []byte, i int) []byte {
	return c.kind(0, i).append(to, func(to []byte, name string) []byte {
		if name != "migration" {
			return c.appendValue(to, i, name)
		}
		if turn := c.turns[i]; turn > 0 {
			return c.appendTurn(to, i, turn)
		}
		if c.each == 0 && i%1000 >= c.cooling {
			return to
		}
		ended := c.ended(i, 0)
		to = append(to, `"migrationState":{"completed":true,"endTimestamp":"`...)
		to = append(to, ended.Format(time.RFC3339)...)
		return c.appendState(to, i, uid('a', i*max(c.each, 1)), ended.Add(-45*time.Second))
	})
}

// appendTurn renders a VMI's latest migration. It is running if turn is odd, and has
// ended if turn is even.
func (c *cluster) appendTurn(to []byte, i int, turn int32) []byte {
	now := time.Now().UTC()
	to = append(to, `"migrationState":{`...)
	if turn%2 == 0 {
		to = append(to, `"completed":true,"endTimestamp":"`...)
		to = append(to, now.Format(time.RFC3339)...)
		to = append(to, `","x":"`...)
	} else {
		to = append(to, `"x":"`...)
	}
	return c.appendState(to, i, uid('d', i*1_000+int(turn+1)/2), now.Add(-time.Minute))
}

func (c *cluster) appendState(to []byte, i int, uid string, started time.Time) []byte {
	to = append(to, `","migrationConfiguration":`+migrationConfiguration+`,"migrationUid":"`...)
	to = append(to, uid...)
	to = append(to, `","mode":"PreCopy","sourceNode":"`...)
	to = appendNode(to, i+1)
	to = append(to, `","sourcePod":"virt-launcher-`...)
	to = appendName(to, i)
	to = append(to, `-x7x7x","startTimestamp":"`...)
	to = append(to, started.Format(time.RFC3339)...)
	to = append(to, `","targetDirectMigrationNodePorts":{"36411":49152,"40247":0,"42159":49153},"targetNode":"`...)
	to = appendNode(to, i)
	to = append(to, `","targetNodeAddress":"10.128.2.17","targetNodeDomainDetected":true,"targetNodeDomainReadyTimestamp":"`...)
	to = append(to, started.Format(time.RFC3339)...)
	to = append(to, `","targetPod":"virt-launcher-`...)
	to = appendName(to, i)
	return append(to, `-q9q9q"},`...)
}

// appendVMIM renders a VMIM. The first VMIM of each VMI is its latest migration.
func (c *cluster) appendVMIM(to []byte, i int) []byte {
	vmi, n := i/c.each, i%c.each
	ended := c.ended(vmi, n)
	return c.kind(1, i).append(to, func(to []byte, name string) []byte {
		switch name {
		case "uid":
			return append(to, uid('a', i)...)
		case "vmim":
			to = append(to, "kubevirt-evacuation-"...)
			return strconv.AppendInt(to, int64(i), 36)
		case "began":
			return append(to, ended.Add(-time.Minute).Format(time.RFC3339)...)
		case "started":
			return append(to, ended.Add(-45*time.Second).Format(time.RFC3339)...)
		case "ended":
			return append(to, ended.Format(time.RFC3339)...)
		default:
			return c.appendValue(to, vmi, name)
		}
	})
}

// appendFailure renders the event of a VMIM that has just failed in the phase Scheduling.
func (c *cluster) appendFailure(to []byte, i int) []byte {
	vmi := i % c.vmis
	now := time.Now().UTC()
	ended, began := now.Format(time.RFC3339), now.Add(-20*time.Second).Format(time.RFC3339)
	return fmt.Appendf(to, failureJSON, uid('c', i), vmi%namespaces, uid('c', i), began, c.version, vmi%nodes, vmi+100_000, began, began, ended)
}

func (c *cluster) appendNodeValue(to []byte, i int, name string) []byte {
	switch name {
	case "node":
		to = append(to, "worker-"...)
		return strconv.AppendInt(to, int64(i), 10)
	case "spec":
		if i < c.nodes/100 {
			to = append(to, `"taints":[{"effect":"NoSchedule","key":"node.kubernetes.io/unschedulable","timeAdded":"`...)
			to = append(to, c.started.Format(time.RFC3339)...)
			to = append(to, `"}],"unschedulable":true,`...)
		}
		return to
	case "now":
		return append(to, time.Now().UTC().Format(time.RFC3339)...)
	default:
		return c.appendValue(to, i, name)
	}
}

func (c *cluster) appendValue(to []byte, i int, name string) []byte {
	switch name {
	case "namespace":
		to = append(to, "team-"...)
		return strconv.AppendInt(to, int64(i%namespaces), 10)
	case "name":
		return appendName(to, i)
	case "node":
		return appendNode(to, i)
	case "uid":
		return append(to, uid('f', i)...)
	case "pod":
		return append(to, uid('e', i)...)
	case "version":
		return strconv.AppendInt(to, c.version, 10)
	case "created":
		return append(to, c.started.Add(-30*24*time.Hour-time.Duration(i)*17*time.Second).Format(time.RFC3339)...)
	default:
		panic("bench-load: no value for " + name)
	}
}

func appendName(to []byte, i int) []byte {
	to = append(to, "vm-"...)
	return strconv.AppendInt(to, int64(100_000+i), 10)
}

func appendNode(to []byte, i int) []byte {
	to = append(to, "worker-"...)
	return strconv.AppendInt(to, int64(i%nodes), 10)
}

func uid(kind byte, i int) string {
	return fmt.Sprintf("%c%07x-5f0e-4c1d-9a77-%012x", kind, i&0xfffffff, i)
}
