package verdicts

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

const (
	idleConnTimeout = 60 * time.Second

	// Dialing may continue after its request has timed out, so that the next request can use the
	// connection. With no limit, connections to a server that never answers would accumulate.
	dialTimeout = 5 * time.Second
)

// newTransport returns a transport to the exporter, over its socket or the network, never through a
// proxy. It reads the token for each request and the certificates for each connection, so both may be
// renewed.
func newTransport(at endpoint, args *Args) http.RoundTripper {
	dialer := &net.Dialer{Timeout: dialTimeout}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if at.socket != "" {
				network, address = "unix", at.socket
			}
			return dialer.DialContext(ctx, network, address)
		},
		DialTLSContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			config, err := loadTLS(args.TLSConfig)
			if err != nil {
				return nil, err
			}
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			defer cancel()
			return (&tls.Dialer{NetDialer: dialer, Config: config}).DialContext(ctx, network, address)
		},
		DisableCompression:     true,
		IdleConnTimeout:        idleConnTimeout,
		MaxResponseHeaderBytes: mostHeaderBytes,
	}
	if args.BearerTokenFile == "" {
		return transport
	}
	return &tokenTransport{file: args.BearerTokenFile, Transport: transport}
}

// tokenTransport reads the token from a file and sends it with each request.
type tokenTransport struct {
	file string
	*http.Transport
}

func (t *tokenTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	token, err := loadToken(t.file)
	if err != nil {
		return nil, err
	}
	request = request.Clone(request.Context())
	request.Header.Set("Authorization", "Bearer "+token)
	return t.Transport.RoundTrip(request)
}

// checkFiles reads every file once, so that a wrong path is an error at the start.
func checkFiles(args *Args) error {
	_, err := loadTLS(args.TLSConfig)
	if args.BearerTokenFile != "" {
		_, tokenErr := loadToken(args.BearerTokenFile)
		err = errors.Join(err, tokenErr)
	}
	return err
}

func loadToken(file string) (string, error) {
	read, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("bearerTokenFile: %w", err)
	}
	token := bytes.TrimSpace(read)
	if len(token) == 0 {
		return "", fmt.Errorf("bearerTokenFile: %s is empty", file)
	}
	return string(token), nil
}

func loadTLS(files *TLSConfig) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if files == nil {
		return config, nil
	}
	if files.CACertFile != "" {
		read, err := os.ReadFile(files.CACertFile)
		if err != nil {
			return nil, fmt.Errorf("tlsConfig.caCertFile: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(read) {
			return nil, fmt.Errorf("tlsConfig.caCertFile: %s contains no PEM certificate", files.CACertFile)
		}
	}
	if files.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("tlsConfig.certFile and keyFile: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
