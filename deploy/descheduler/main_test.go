package main

import (
	"slices"
	"testing"

	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/descheduler/pkg/descheduler"
	"sigs.k8s.io/descheduler/pkg/framework/pluginregistry"

	"github.com/kubevirt-eviction-exporter/exporter/deploy/descheduler/verdicts"
)

// The descheduler accepts policy.yaml, with the plugin at both extension points.
func TestPolicy(t *testing.T) {
	descheduler.SetupPlugins()
	registry := pluginregistry.PluginRegistry
	verdicts.Register(registry)
	policy, err := descheduler.LoadPolicyConfig("policy.yaml", fake.NewClientset(), registry)
	if err != nil {
		t.Fatal(err)
	}
	if *policy.MaxNoOfPodsToEvictPerNode != 2 || *policy.MaxNoOfPodsToEvictTotal != 5 {
		t.Errorf("limits: %d per node, %d in all", *policy.MaxNoOfPodsToEvictPerNode, *policy.MaxNoOfPodsToEvictTotal)
	}
	profile := policy.Profiles[0]
	for point, enabled := range map[string][]string{
		"filter":            profile.Plugins.Filter.Enabled,
		"preEvictionFilter": profile.Plugins.PreEvictionFilter.Enabled,
	} {
		if want := []string{"DefaultEvictor", verdicts.Name}; !slices.Equal(enabled, want) {
			t.Errorf("%s: got %v, want %v", point, enabled, want)
		}
	}
	for _, config := range profile.PluginConfigs {
		if args, ok := config.Args.(*verdicts.Args); ok {
			if args.URLPrefix != "unix:/run/eviction-exporter/query.sock" || !*args.Ignorable {
				t.Errorf("args: %+v", args)
			}
			return
		}
	}
	t.Error("the policy does not configure " + verdicts.Name)
}
