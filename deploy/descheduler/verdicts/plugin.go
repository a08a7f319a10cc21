package verdicts

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	frameworktypes "sigs.k8s.io/descheduler/pkg/framework/types"
)

// Name is the plugin's name in a policy.
const Name = "KubeVirtVerdicts"

const (
	appLabel          = "kubevirt.io"
	launcherApp       = "virt-launcher"
	domainAnnotation  = "kubevirt.io/domain"
	createdByLabel    = "kubevirt.io/created-by"
	leavingAnnotation = "descheduler.alpha.kubernetes.io/eviction-in-progress"

	// The API server's limit on the length of a name. No VMI can have a longer name.
	longestName = 253
)

// Plugin asks the exporter before a virt-launcher pod is evicted.
type Plugin struct {
	ctx       context.Context
	log       klog.Logger
	api       api
	feed      *feed
	breaker   *breaker
	counters  *counters
	ignorable bool
	timeout   time.Duration
}

var _ frameworktypes.EvictorPlugin = &Plugin{}

// New builds the plugin and starts its polling, which ends with ctx. It does not wait for an answer.
func New(ctx context.Context, obj runtime.Object, _ frameworktypes.Handle) (frameworktypes.Plugin, error) {
	args, ok := obj.(*Args)
	if !ok {
		return nil, fmt.Errorf("%s: expected arguments of type *verdicts.Args, not %T", Name, obj)
	}
	at, err := parseURLPrefix(args.URLPrefix)
	if err != nil {
		return nil, fmt.Errorf("%s: urlPrefix: %w", Name, err)
	}
	if err := checkFiles(args); err != nil {
		return nil, fmt.Errorf("%s: %w", Name, err)
	}
	plugin := newPlugin(ctx, newClient(at, args), args, processCounters())
	go plugin.feed.run(ctx)
	return plugin, nil
}

// newPlugin is New without polling.
func newPlugin(ctx context.Context, api api, args *Args, counters *counters) *Plugin {
	log := klog.FromContext(ctx).WithValues("plugin", Name)
	breaker := &breaker{}
	return &Plugin{
		ctx:       ctx,
		log:       log,
		api:       api,
		feed:      newFeed(api, counters, log, breaker.retryNow),
		breaker:   breaker,
		counters:  counters,
		ignorable: *args.Ignorable,
		timeout:   args.HTTPTimeout.Duration,
	}
}

// Name implements the framework's Plugin.
func (p *Plugin) Name() string {
	return Name
}

// Filter reports whether a pod may be a candidate for eviction. It asks the exporter only if the
// snapshot blocks the VMI.
func (p *Plugin) Filter(pod *v1.Pod) bool {
	if !isLauncher(pod) || isLeaving(pod) {
		return true
	}
	asked := candidateOf(pod)
	if !asked.isNamed() {
		return p.conclude(pod, atFilter, unnamed, block{})
	}
	latest := p.feed.read(p.ctx, p.timeout)
	switch {
	case !latest.isFresh(time.Now()):
		return p.conclude(pod, atFilter, unavailable, block{})
	case latest.contains(atFilter, asked.key()):
		return p.judge(pod, atFilter, asked)
	case latest.stale:
		return p.conclude(pod, atFilter, stale, block{})
	default:
		return p.conclude(pod, atFilter, allowed, block{})
	}
}

// PreEvictionFilter reports whether a pod may be evicted now. It asks the exporter about every
// launcher pod, and all rules apply.
func (p *Plugin) PreEvictionFilter(pod *v1.Pod) bool {
	if !isLauncher(pod) || isLeaving(pod) {
		return true
	}
	asked := candidateOf(pod)
	if !asked.isNamed() {
		return p.conclude(pod, atPreEviction, unnamed, block{})
	}
	return p.judge(pod, atPreEviction, asked)
}

// judge decides by the exporter's verdict. Without a verdict it blocks a VMI that a fresh snapshot
// blocks; for other VMIs ignorable decides.
func (p *Plugin) judge(pod *v1.Pod, at checkpoint, asked candidate) bool {
	if ended, why, ok := p.ask(at, asked); ok {
		return p.conclude(pod, at, ended, why)
	}
	latest := p.feed.latest.Load()
	if latest.isFresh(time.Now()) {
		if why, found := latest.find(at, asked.key(), asked.VMIUID); found {
			return p.conclude(pod, at, blockedBySnapshot, why)
		}
	}
	return p.conclude(pod, at, unavailable, block{})
}

// ask sends a request if the breaker allows it.
func (p *Plugin) ask(at checkpoint, asked candidate) (outcome, block, bool) {
	generation, admitted := p.breaker.admit(time.Now())
	if !admitted {
		return 0, block{}, false
	}
	ended, why, err := p.api.ask(p.ctx, at, asked)
	switch {
	case err == nil:
		p.noteAnswer()
		return ended, why, true
	case isRejection(err):
		p.noteAnswer()
		p.log.Error(err, "The exporter rejected a request", "vmi", klog.KRef(asked.Namespace, asked.Name))
	case p.breaker.fail(generation, time.Now()) && p.ctx.Err() == nil:
		p.log.Error(err, "Verdicts are unavailable", "ignorable", p.ignorable)
	}
	return 0, block{}, false
}

func (p *Plugin) noteAnswer() {
	if p.breaker.succeed() {
		p.log.Info("Verdicts are available again")
	}
}

// conclude counts an outcome, logs a block, and reports whether the eviction may continue.
func (p *Plugin) conclude(pod *v1.Pod, at checkpoint, ended outcome, why block) bool {
	p.counters.count(at, ended)
	permitted := ended.permits(p.ignorable)
	if !permitted {
		p.logBlock(pod, at, ended, why)
	}
	return permitted
}

// logBlock logs a block. It logs "Eviction blocked" once for each block that the exporter counted.
func (p *Plugin) logBlock(pod *v1.Pod, at checkpoint, ended outcome, why block) {
	log := p.log.V(2)
	if !log.Enabled() {
		return
	}
	vmi := klog.KRef(pod.Namespace, pod.Annotations[domainAnnotation])
	if ended == blocked {
		log.Info("Eviction blocked", "pod", klog.KObj(pod), "vmi", vmi,
			"checkpoint", checkpoints[at], "reason", why.reason, "notBefore", why.notBefore)
		return
	}
	log.Info("Eviction blocked without a verdict", "pod", klog.KObj(pod), "vmi", vmi,
		"checkpoint", checkpoints[at], "outcome", outcomes[ended], "reason", why.reason, "notBefore", why.notBefore)
}

// isLeaving reports whether the descheduler already counts the pod as evicted. If the plugin
// blocked such a pod, the descheduler would evict another pod instead.
func isLeaving(pod *v1.Pod) bool {
	_, found := pod.Annotations[leavingAnnotation]
	return found
}

func isLauncher(pod *v1.Pod) bool {
	return pod.Labels[appLabel] == launcherApp
}

func candidateOf(pod *v1.Pod) candidate {
	return candidate{
		Namespace: pod.Namespace,
		Name:      pod.Annotations[domainAnnotation],
		VMIUID:    pod.Labels[createdByLabel],
		Node:      pod.Spec.NodeName,
		Pod:       pod.Name,
	}
}

func (c candidate) isNamed() bool {
	return c.Name != "" && len(c.Name) <= longestName
}
