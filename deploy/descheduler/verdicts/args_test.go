package verdicts

import (
	"reflect"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SetDefaults sets omitted fields. It does not change the others, even if they are false.
func TestSetDefaults(t *testing.T) {
	args := &Args{}
	SetDefaults(args)
	expect(t, "ignorable", *args.Ignorable, true)
	expect(t, "httpTimeout", args.HTTPTimeout.Duration, time.Second)

	args = &Args{Ignorable: new(false), HTTPTimeout: &metav1.Duration{Duration: time.Minute}}
	SetDefaults(args)
	expect(t, "ignorable", *args.Ignorable, false)
	expect(t, "httpTimeout", args.HTTPTimeout.Duration, time.Minute)
}

// A deep copy shares no memory with its original.
func TestDeepCopyObject(t *testing.T) {
	args := makeArgs(func(a *Args) { a.TLSConfig = &TLSConfig{CACertFile: "/ca"} })
	copied := args.DeepCopyObject().(*Args)
	if !reflect.DeepEqual(args, copied) {
		t.Fatalf("got %v, want %v", copied, args)
	}
	*copied.Ignorable = false
	copied.HTTPTimeout.Duration = 0
	copied.TLSConfig.CACertFile = ""
	if reflect.DeepEqual(args.TLSConfig, copied.TLSConfig) || !*args.Ignorable || args.HTTPTimeout.Duration == 0 {
		t.Errorf("the original changed with its copy: %v", args)
	}
	if (*Args)(nil).DeepCopyObject() != nil {
		t.Error("the copy of nil is not nil")
	}
}

// Validate accepts these arguments, before and after SetDefaults.
func TestValidateTakes(t *testing.T) {
	for name, args := range map[string]*Args{
		"loopback":     {URLPrefix: "http://127.0.0.1:9810"},
		"path":         {URLPrefix: "http://exporter.shop.svc:9810/behind/a/proxy/"},
		"IPv6":         {URLPrefix: "http://[::1]:9810", BearerTokenFile: "/token"},
		"socket":       {URLPrefix: "unix:/run/exporter/query.sock", BearerTokenFile: "/token"},
		"socket URL":   {URLPrefix: "unix:///run/exporter/query.sock"},
		"TLS":          {URLPrefix: "https://exporter:9810", BearerTokenFile: "/token"},
		"mutual TLS":   {URLPrefix: "https://exporter", TLSConfig: &TLSConfig{"/ca", "/cert", "/key"}},
		"long timeout": {URLPrefix: "http://h", HTTPTimeout: &metav1.Duration{Duration: 30 * time.Second}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := Validate(args); err != nil {
				t.Error(err)
			}
			SetDefaults(args)
			if err := Validate(args); err != nil {
				t.Error(err)
			}
		})
	}
}

// Validate names each invalid field.
func TestValidateRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		args Args
		says string
	}{
		"nothing":        {Args{}, "urlPrefix: missing: expected http://HOST:PORT, https://HOST:PORT or unix:/PATH"},
		"scheme":         {Args{URLPrefix: "tcp://h:1"}, `urlPrefix: "tcp://h:1": expected http://`},
		"no scheme":      {Args{URLPrefix: "h:9810"}, "urlPrefix: "},
		"no host":        {Args{URLPrefix: "http://:9810"}, "urlPrefix: "},
		"not a URL":      {Args{URLPrefix: "http://h:port"}, "urlPrefix: "},
		"query":          {Args{URLPrefix: "http://h?x=1"}, "expected no user, query or fragment"},
		"password":       {Args{URLPrefix: "http://u:secret@h"}, "expected no user, query or fragment"},
		"relative":       {Args{URLPrefix: "unix:run/q.sock"}, "unix:run/q.sock: not an absolute path, expected unix:/PATH"},
		"long socket":    {Args{URLPrefix: "unix:/" + strings.Repeat("x", 107)}, "expected at most 107"},
		"unix and TLS":   {Args{URLPrefix: "unix:/q", TLSConfig: &TLSConfig{}}, "tlsConfig: urlPrefix unix:/q is not encrypted"},
		"http and TLS":   {Args{URLPrefix: "http://h", TLSConfig: &TLSConfig{}}, "tlsConfig: urlPrefix http://h is not encrypted"},
		"half a pair":    {Args{URLPrefix: "https://h", TLSConfig: &TLSConfig{CertFile: "/c"}}, "expected both certFile and keyFile"},
		"relative CA":    {Args{URLPrefix: "https://h", TLSConfig: &TLSConfig{CACertFile: "ca"}}, `tlsConfig.caCertFile: "ca": expected an absolute path`},
		"clear token":    {Args{URLPrefix: "http://h", BearerTokenFile: "/token"}, "bearerTokenFile: the token would be sent unencrypted"},
		"no timeout":     {Args{URLPrefix: "http://h", HTTPTimeout: &metav1.Duration{}}, "httpTimeout: 0s: expected more than 0s and at most 30s"},
		"timeout of 31s": {Args{URLPrefix: "http://h", HTTPTimeout: &metav1.Duration{Duration: 31 * time.Second}}, "httpTimeout: 31s"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Validate(&test.args)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want it to say %q", err, test.says)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("it shows the password: %v", err)
			}
		})
	}
}

// Validate returns all errors at once, with the name of the plugin.
func TestValidateTellsAll(t *testing.T) {
	err := Validate(&Args{
		URLPrefix:       "ftp://h",
		HTTPTimeout:     &metav1.Duration{Duration: -1},
		TLSConfig:       &TLSConfig{KeyFile: "key"},
		BearerTokenFile: "token",
	})
	for _, says := range []string{Name, "urlPrefix", "httpTimeout", "tlsConfig.keyFile", "both certFile and keyFile", "bearerTokenFile"} {
		if !strings.Contains(err.Error(), says) {
			t.Errorf("%v: does not contain %s", err, says)
		}
	}
}
