package verdicts

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Args is the plugin's configuration in the policy file.
//
// Where possible, the fields have the names used in issue 1726 of the descheduler.
type Args struct {
	metav1.TypeMeta `json:",inline"`

	// URLPrefix is the URL of the query API without /v1: http://HOST:PORT, https://HOST:PORT or
	// unix:/PATH for a socket. It may have a path after HOST:PORT. Required.
	URLPrefix string `json:"urlPrefix"`

	// HTTPTimeout is how long one request for a verdict may take, including the body. Default 1s.
	HTTPTimeout *metav1.Duration `json:"httpTimeout,omitempty"`

	// Ignorable says what happens without a verdict: true allows the eviction unless a fresh snapshot
	// blocks it, false blocks it. Default true.
	Ignorable *bool `json:"ignorable,omitempty"`

	// TLSConfig is for an https:// URLPrefix. Default: the system's CAs and no client certificate.
	TLSConfig *TLSConfig `json:"tlsConfig,omitempty"`

	// BearerTokenFile contains the token to send as "Authorization: Bearer". Default: none.
	BearerTokenFile string `json:"bearerTokenFile,omitempty"`
}

// TLSConfig names PEM files. The plugin reads them for each new connection.
type TLSConfig struct {
	// CACertFile contains the CAs that may have signed the server's certificate.
	CACertFile string `json:"caCertFile,omitempty"`

	// CertFile and KeyFile are the client's certificate and key. Set both or neither.
	CertFile string `json:"certFile,omitempty"`
	KeyFile  string `json:"keyFile,omitempty"`
}

// DeepCopyObject implements runtime.Object.
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
