// Package verdicts is the descheduler plugin KubeVirtVerdicts: it asks the eviction exporter
// whether a KubeVirt VM may be evicted, and obeys. It holds no policy of its own.
//
//	profiles:
//	- name: vms
//	  pluginConfig:
//	  - name: KubeVirtVerdicts
//	    args:
//	      urlPrefix: unix:/run/eviction-exporter/query.sock
//	  plugins:
//	    filter: {enabled: [KubeVirtVerdicts]}
//	    preevictionfilter: {enabled: [KubeVirtVerdicts]}
//
// Enable it at both points: migrations and evacuations under way block at both, cooldowns at
// preevictionfilter. The descheduler ignores any other spelling of that name without a word.
// [Args] lists the arguments.
//
// # What is asked
//
// Only pods labelled kubevirt.io=virt-launcher; every other pod is allowed unseen. So is a launcher
// with the annotation descheduler.alpha.kubernetes.io/eviction-in-progress: the descheduler counts
// it as gone already, and would move another VM in the place of one that is hidden. A launcher's
// VMI is the one that its annotation kubevirt.io/domain names in its namespace, and its label
// kubevirt.io/created-by carries that VMI's UID.
//
// One background request at a time, bound to the context of [New], holds GET /v1/blocked open and
// keeps its answer as a snapshot. Filter looks the VMI up there and asks POST /v1/verdicts only
// about one that is blocked, because the exporter counts blocks by those requests.
// PreEvictionFilter always asks, with no checkpoint, so that all rules apply: a migration that began
// after the snapshot blocks there. The first Filter waits for the first snapshot, once and for
// httpTimeout at most.
//
// # When there is no answer
//
// Any failure to get a verdict (no connection, a timeout, a status other than 200, a body that
// cannot be read, a snapshot older than its maxAgeSeconds) makes it unavailable. After a failed
// request no other is sent for 5 s, then one, and after each further failure for twice as long, up
// to 60 s: an exporter that is down costs one timeout and not one per pod.
//
//   - ignorable: true (the default) allows the eviction, unless a snapshot not older than its
//     maxAgeSeconds says that this VMI is blocked at this point, before an eviction by any rule:
//     that evidence still holds.
//   - ignorable: false refuses it. It refuses as well what an answer allows that says "stale": the
//     exporter has lost the API server, so it cannot know of a migration that began since.
//
// A VMI that the exporter does not know ("known": false) is allowed and counted apart.
//
// # What is to be seen
//
// At -v=2 "Eviction blocked" is logged once for each block that the exporter answered and counted,
// "Eviction refused without a verdict" for each that it did not. That verdicts or the snapshot have
// become unavailable, or available again, is logged once per change at any verbosity. Among the
// descheduler's own metrics are descheduler_kubevirt_verdicts_total,
// descheduler_kubevirt_snapshot_polls_total and descheduler_kubevirt_snapshot_timestamp_seconds.
package verdicts
