package verdicts

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

const defaultHTTPTimeout = time.Second

// SetDefaults sets the fields that the policy omits. The descheduler calls Validate first.
func SetDefaults(obj runtime.Object) {
	args := obj.(*Args)
	if args.HTTPTimeout == nil {
		args.HTTPTimeout = &metav1.Duration{Duration: defaultHTTPTimeout}
	}
	if args.Ignorable == nil {
		args.Ignorable = new(true)
	}
}
