package verdicts

import (
	"sigs.k8s.io/descheduler/pkg/framework/pluginregistry"
)

// Register adds the plugin to the descheduler's registry. Call it after descheduler.SetupPlugins,
// which empties the registry.
func Register(registry pluginregistry.Registry) {
	pluginregistry.Register(Name, New, &Plugin{}, &Args{}, Validate, SetDefaults, registry)
}
