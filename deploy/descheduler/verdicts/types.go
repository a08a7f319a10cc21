package verdicts

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Args is the plugin's configuration, as it stands in the policy file.
//
// The names are those of descheduler issue 1726 where it has them.
type Args struct {
	metav1.TypeMeta `json:",inline"`

	// URLPrefix is where the query API is, without /v1: http://HOST:PORT, https://HOST:PORT or
	// unix:/PATH of a socket. A path after HOST:PORT is kept. Required.
	URLPrefix string `json:"urlPrefix"`

	// HTTPTimeout is how long one verdict may take, body included. Default 1s.
	HTTPTimeout *metav1.Duration `json:"httpTimeout,omitempty"`

	// Ignorable says what happens where no verdict can be had: true allows the eviction, false
	// refuses it. Default true.
	Ignorable *bool `json:"ignorable,omitempty"`

	// TLSConfig is for an https:// URLPrefix. Default: the system's authorities, no certificate.
	TLSConfig *TLSConfig `json:"tlsConfig,omitempty"`

	// BearerTokenFile holds the token to send as "Authorization: Bearer". Default: none.
	BearerTokenFile string `json:"bearerTokenFile,omitempty"`
}

// TLSConfig names PEM files. Each is read again when it changes.
type TLSConfig struct {
	// CACertFile holds the authorities that may have signed the server's certificate.
	CACertFile string `json:"caCertFile,omitempty"`

	// CertFile and KeyFile are the client's certificate and key: both or none.
	CertFile string `json:"certFile,omitempty"`
	KeyFile  string `json:"keyFile,omitempty"`
}

// DeepCopyObject makes Args a runtime.Object.
func (a *Args) DeepCopyObject() runtime.Object {
	if a == nil {
		return nil
	}
	copied := *a
	if a.HTTPTimeout != nil {
		copied.HTTPTimeout = new(*a.HTTPTimeout)
	}
	if a.Ignorable != nil {
		copied.Ignorable = new(*a.Ignorable)
	}
	if a.TLSConfig != nil {
		copied.TLSConfig = new(*a.TLSConfig)
	}
	return &copied
}
