// Command certificates writes key pairs into a directory:
// `certificates DIR NAME[/GROUP][@HOST,...][=DAYS] ...`.
// With `certificates token KEY ISSUER SUBJECT EXPIRES` it prints a service account's token.
//
// The first call creates the CA (ca.crt, ca.key), which signs all other certificates. For each NAME
// it writes NAME.crt and NAME.key. A server can use this pair on the loopback address and on each
// HOST. For Kubernetes, a client with this pair is the user NAME in the group GROUP. The
// certificate expires after DAYS, by default 30.
package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

type pair struct {
	certificate *x509.Certificate
	key         crypto.PrivateKey
}

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: certificates DIR NAME[/GROUP][@HOST,...][=DAYS] ...")
	}
	if os.Args[1] == "token" {
		printed, err := token(os.Args[2:])
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(printed)
		return
	}
	directory := os.Args[1]
	ca, err := authority(directory)
	if err != nil {
		log.Fatal(err)
	}
	for _, subject := range os.Args[2:] {
		subject, days, limited := strings.Cut(subject, "=")
		subject, hosts, _ := strings.Cut(subject, "@")
		name, group, _ := strings.Cut(subject, "/")
		template := leaf(name, group, hosts)
		if limited {
			count, err := strconv.Atoi(days)
			if err != nil {
				log.Fatal(err)
			}
			template.NotAfter = time.Now().AddDate(0, 0, count)
		}
		if _, err := write(directory, name, template, &ca); err != nil {
			log.Fatal(err)
		}
	}
}

func authority(directory string) (pair, error) {
	path := filepath.Join(directory, "ca")
	loaded, err := tls.LoadX509KeyPair(path+".crt", path+".key")
	if errors.Is(err, fs.ErrNotExist) {
		return write(directory, "ca", root(), nil)
	}
	return pair{loaded.Leaf, loaded.PrivateKey}, err
}

func root() *x509.Certificate {
	template := template(pkix.Name{CommonName: "test authority"})
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign
	return template
}

func leaf(name, group, hosts string) *x509.Certificate {
	subject := pkix.Name{CommonName: name}
	if group != "" {
		subject.Organization = []string{group}
	}
	template := template(subject)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	template.DNSNames = []string{"localhost"}
	for _, host := range strings.FieldsFunc(hosts, func(r rune) bool { return r == ',' }) {
		if address := net.ParseIP(host); address != nil {
			template.IPAddresses = append(template.IPAddresses, address)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return template
}

func template(subject pkix.Name) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		log.Fatal(err)
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial, Subject: subject,
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(30 * 24 * time.Hour),
	}
}

// write creates a key and a certificate. Without a signer the certificate is self-signed.
func write(directory, name string, template *x509.Certificate, signer *pair) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	if signer == nil {
		signer = &pair{template, key}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, signer.certificate, key.Public(), signer.key)
	if err != nil {
		return pair{}, err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return pair{}, err
	}
	path := filepath.Join(directory, name)
	if err := block(path+".key", "PRIVATE KEY", secret); err != nil {
		return pair{}, err
	}
	if err := block(path+".crt", "CERTIFICATE", der); err != nil {
		return pair{}, err
	}
	certificate, err := x509.ParseCertificate(der)
	return pair{certificate, key}, err
}

func block(path, kind string, bytes []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: bytes}), 0o600)
}
