package verdicts

import (
	"sigs.k8s.io/descheduler/pkg/framework/pluginregistry"
)

// Register adds the plugin to the descheduler's registry, which must have its own plugins already:
// descheduler.SetupPlugins empties it.
func Register(registry pluginregistry.Registry) {
	pluginregistry.Register(Name, New, &Plugin{}, &Args{}, Validate, SetDefaults, registry)
}
