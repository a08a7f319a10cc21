// Package verdicts is the descheduler plugin KubeVirtVerdicts. It asks the eviction exporter
// whether a KubeVirt VM may be evicted, and does what the answer says. It has no rules of its own.
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
// Enable the plugin at both extension points. Running migrations and evacuations block at both
// points, but cooldowns block only at preevictionfilter. The descheduler ignores a misspelled
// extension point without an error. [Args] lists the arguments.
//
// # Requests
//
// The plugin asks only about pods with the label kubevirt.io=virt-launcher and allows all others.
// It also allows a launcher pod with the annotation
// descheduler.alpha.kubernetes.io/eviction-in-progress, because the descheduler already counts this
// pod as evicted. If the plugin blocked the pod, the descheduler would evict another VM instead.
// The pod's annotation kubevirt.io/domain is the name of its VMI, and the label
// kubevirt.io/created-by is the VMI's UID.
//
// A background goroutine, which ends with the context of [New], long-polls GET /v1/blocked and
// stores the answer as a snapshot. Filter looks up the VMI in the snapshot. If it is blocked there,
// Filter asks POST /v1/verdicts, so that the exporter counts the block. Otherwise Filter sends no
// request. PreEvictionFilter always asks. Its request names no checkpoint, so all rules apply, and
// a migration that began after the snapshot also blocks. The first call of Filter waits until the
// first poll has ended, for at most httpTimeout.
//
// # Errors
//
// There is no verdict after an error: no connection, a timeout, a status other than 200, an
// unreadable body, or a snapshot older than its maxAgeSeconds. After a failed request the plugin
// sends no request for 5 s. Then it sends one as a trial. After each further failure it waits twice
// as long, up to 60 s. So if the exporter is down, the plugin waits for one timeout and not for one
// per pod.
//
// Without a verdict, the argument ignorable decides:
//
//   - ignorable: true (the default) allows the eviction, unless a fresh snapshot says that this VMI
//     is blocked. PreEvictionFilter applies the snapshot's blocks of both extension points.
//   - ignorable: false blocks the eviction. It also blocks if the answer says "stale". Then the
//     exporter has lost its connection to the API server, so it cannot know about new migrations.
//
// A VMI that the exporter does not know ("known": false) is allowed and counted as unknown, unless
// the answer is stale.
//
// # Logs and metrics
//
// At -v=2 the plugin logs "Eviction blocked" once for each block that the exporter counted, and
// "Eviction blocked without a verdict" for each other block. At any verbosity it logs once when
// verdicts or the snapshot become unavailable, and once when they are available again. The
// descheduler's metrics include descheduler_kubevirt_verdicts_total,
// descheduler_kubevirt_snapshot_polls_total and descheduler_kubevirt_snapshot_timestamp_seconds.
package verdicts
