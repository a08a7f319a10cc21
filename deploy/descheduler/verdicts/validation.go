package verdicts

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
)

const (
	// The descheduler asks about one pod after another, so a longer timeout would block its cycle.
	longestHTTPTimeout = 30 * time.Second

	// The size of a path in Linux's sockaddr_un, without the final zero byte.
	longestSocketPath = 107

	expectedURLPrefix = "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH"
)

// Validate returns one error that names every invalid field.
func Validate(obj runtime.Object) error {
	args, ok := obj.(*Args)
	if !ok {
		return fmt.Errorf("%s: expected arguments of type *verdicts.Args, not %T", Name, obj)
	}
	var errs []error
	at, err := parseURLPrefix(args.URLPrefix)
	if err != nil {
		errs = append(errs, fmt.Errorf("urlPrefix: %w", err))
	}
	if args.HTTPTimeout != nil {
		if d := args.HTTPTimeout.Duration; d <= 0 || d > longestHTTPTimeout {
			errs = append(errs, fmt.Errorf(
				"httpTimeout: %s: expected more than 0s and at most %s", d, longestHTTPTimeout))
		}
	}
	if args.TLSConfig != nil {
		errs = append(errs, validateTLSConfig(*args.TLSConfig)...)
		if err == nil && !at.tls {
			errs = append(errs, fmt.Errorf(
				"tlsConfig: urlPrefix %s is not encrypted: expected https:// or no tlsConfig", args.URLPrefix))
		}
	}
	errs = append(errs, validateFile("bearerTokenFile", args.BearerTokenFile)...)
	if err == nil && args.BearerTokenFile != "" && !at.isPrivate() {
		errs = append(errs, fmt.Errorf(
			"bearerTokenFile: the token would be sent unencrypted to %s: expected https://,"+
				" unix: or a loopback address", args.URLPrefix))
	}
	if len(errs) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", Name, utilerrors.NewAggregate(errs))
}

func validateTLSConfig(config TLSConfig) []error {
	errs := validateFile("tlsConfig.caCertFile", config.CACertFile)
	errs = append(errs, validateFile("tlsConfig.certFile", config.CertFile)...)
	errs = append(errs, validateFile("tlsConfig.keyFile", config.KeyFile)...)
	if (config.CertFile == "") != (config.KeyFile == "") {
		errs = append(errs, errors.New("tlsConfig: expected both certFile and keyFile, or neither"))
	}
	return errs
}

func validateFile(field, path string) []error {
	if path == "" || filepath.IsAbs(path) {
		return nil
	}
	return []error{fmt.Errorf("%s: %q: expected an absolute path", field, path)}
}

// endpoint is a parsed urlPrefix: the base URL and, if any, the socket.
type endpoint struct {
	base   string
	socket string
	tls    bool
	host   string
}

func parseURLPrefix(prefix string) (endpoint, error) {
	if socket, ok := strings.CutPrefix(prefix, "unix:"); ok {
		return parseSocket(socket)
	}
	parsed, err := url.Parse(prefix)
	if err != nil {
		return endpoint{}, fmt.Errorf("%w: %s", err, expectedURLPrefix)
	}
	if prefix == "" {
		return endpoint{}, fmt.Errorf("missing: %s", expectedURLPrefix)
	}
	if parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Hostname() == "" {
		return endpoint{}, fmt.Errorf("%q: %s", prefix, expectedURLPrefix)
	}
	if parsed.User != nil || parsed.RawQuery != "" || parsed.Fragment != "" {
		return endpoint{}, fmt.Errorf("%q: expected no user, query or fragment", parsed.Redacted())
	}
	return endpoint{
		base: strings.TrimRight(parsed.String(), "/"),
		tls:  parsed.Scheme == "https",
		host: parsed.Hostname(),
	}, nil
}

func parseSocket(path string) (endpoint, error) {
	if !filepath.IsAbs(path) {
		return endpoint{}, fmt.Errorf("unix:%s: not an absolute path, expected unix:/PATH", path)
	}
	if len(path) > longestSocketPath {
		return endpoint{}, fmt.Errorf(
			"unix:%s: the path has %d bytes, expected at most %d", path, len(path), longestSocketPath)
	}
	return endpoint{base: "http://exporter", socket: path}, nil
}

// isPrivate reports whether nobody on the network can read the requests.
func (e endpoint) isPrivate() bool {
	if e.tls || e.socket != "" || e.host == "localhost" {
		return true
	}
	ip := net.ParseIP(e.host)
	return ip != nil && ip.IsLoopback()
}
