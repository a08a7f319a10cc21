package verdicts

import (
	"errors"
	"strings"
	"testing"
	"time"
)

const blockedBody = `{"asOf": "2026-01-01T00:00:00Z", "stale": false, "maxAgeSeconds": 90.0, "blocked": [
	{"namespace": "shop", "name": "db1", "vmiUid": "u1", "node": "n1", "checkpoint": "filter",
	 "reason": "migration_in_progress", "notBefore": null},
	{"namespace": "shop", "name": "db1", "vmiUid": "u1", "node": "n1", "checkpoint": "preEviction",
	 "reason": "cooldown", "notBefore": "2026-01-01T00:10:00Z"},
	{"namespace": "shop", "name": "db2", "vmiUid": "u2", "node": "n1", "checkpoint": "one of a later version",
	 "reason": "cooldown", "notBefore": null},
	{"namespace": "shop", "name": "db3", "vmiUid": "u3", "node": "n1", "checkpoint": "filter",
	 "reason": "platform_update", "notBefore": null},
	{"namespace": "shop", "name": "db4", "vmiUid": "u4", "node": "n1", "checkpoint": "preEviction",
	 "reason": "policy", "notBefore": null}]}`

// The snapshot lists the blocked VMIs of each checkpoint, for any reason. Entries with an unknown
// checkpoint are ignored.
func TestReadSnapshot(t *testing.T) {
	now := time.Now()
	read, err := readSnapshot([]byte(blockedBody), `"tag"`, now)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "etag", read.etag, `"tag"`)
	expect(t, "maxAge", read.maxAge, 90*time.Second)
	expect(t, "answeredAt", read.answeredAt, now)
	expect(t, "stale", read.stale, false)
	expect(t, "at filter", len(read.blocks[atFilter]), 2)
	expect(t, "at preEviction", len(read.blocks[atPreEviction]), 2)
	running := block{vmiUID: "u1", reason: "migration_in_progress"}
	cooling := block{vmiUID: "u1", reason: "cooldown", notBefore: "2026-01-01T00:10:00Z"}
	updating, excepted := block{vmiUID: "u3", reason: "platform_update"}, block{vmiUID: "u4", reason: "policy"}
	expect(t, "platform_update", read.blocks[atFilter][vmiKey{"shop", "db3"}], updating)
	expect(t, "policy", read.blocks[atPreEviction][vmiKey{"shop", "db4"}], excepted)
	expect(t, "filter", read.blocks[atFilter][vmiKey{"shop", "db1"}], running)
	expect(t, "preEviction", read.blocks[atPreEviction][vmiKey{"shop", "db1"}], cooling)
}

// The maximum age of a snapshot is limited to an hour.
func TestReadSnapshotBoundsItsAge(t *testing.T) {
	read, err := readSnapshot([]byte(`{"stale": false, "maxAgeSeconds": 1e300, "blocked": []}`), "tag", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "maxAge", read.maxAge, time.Hour)
}

// An invalid set is an error that names the fault.
func TestReadSnapshotRefuses(t *testing.T) {
	for name, test := range map[string]struct{ body, etag, says string }{
		"garbage":    {"<html>", "tag", "not a blocked set"},
		"cut":        {blockedBody[:200], "tag", "not a blocked set"},
		"no ETag":    {blockedBody, "", "ETag: missing"},
		"empty":      {`{}`, "tag", "stale: missing"},
		"no age":     {`{"stale": false, "blocked": []}`, "tag", "maxAgeSeconds: expected more than 0, not 0"},
		"no blocked": {`{"stale": false, "maxAgeSeconds": 90}`, "tag", "blocked: missing"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := readSnapshot([]byte(test.body), test.etag, time.Now()); err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want it to say %q", err, test.says)
			}
		})
	}
}

// A set with too many VMIs is an error. It is not truncated.
func TestReadSnapshotTooLarge(t *testing.T) {
	body := `{"stale": false, "maxAgeSeconds": 90, "blocked": [{}` + strings.Repeat(",{}", mostBlocked) + `]}`
	if _, err := readSnapshot([]byte(body), "tag", time.Now()); !errors.Is(err, errTooLarge) {
		t.Errorf("got %v", err)
	}
}

// readVerdict reads each kind of verdict.
func TestReadVerdict(t *testing.T) {
	for name, test := range map[string]struct {
		stale, known, allows string
		want                 outcome
	}{
		"allowed":           {"false", "true", "true", allowed},
		"blocked":           {"false", "true", "false", blocked},
		"unknown":           {"false", "false", "true", unknown},
		"allowed but stale": {"true", "true", "true", stale},
		"unknown and stale": {"true", "false", "true", stale},
		"blocked and stale": {"true", "true", "false", blocked},
	} {
		t.Run(name, func(t *testing.T) {
			body := `{"stale": ` + test.stale + `, "verdicts": [{"namespace": "shop", "name": "db1", "known": ` +
				test.known + `, "allowed": ` + test.allows + `, "reason": null, "notBefore": null}]}`
			got, _, err := readVerdict([]byte(body), candidate{Namespace: "shop", Name: "db1"})
			if err != nil {
				t.Fatal(err)
			}
			expect(t, "outcome", outcomes[got], outcomes[test.want])
		})
	}
}

// Anything other than one verdict about the requested VMI is an error. A missing field does not
// count as false.
func TestReadVerdictRefuses(t *testing.T) {
	for name, test := range map[string]struct{ body, says string }{
		"garbage":    {"nope", "not a list of verdicts"},
		"empty":      {`{}`, "stale: missing"},
		"none":       {`{"stale": false, "verdicts": []}`, "verdicts: expected 1, not 0"},
		"two":        {`{"stale": false, "verdicts": [{}, {}]}`, "verdicts: expected 1, not 2"},
		"other VMI":  {`{"stale": false, "verdicts": [{"namespace": "shop", "name": "db2"}]}`, "expected shop/db1, not shop/db2"},
		"no allowed": {`{"stale": false, "verdicts": [{"namespace": "shop", "name": "db1", "known": true}]}`, "expected both allowed and known"},
		"no known":   {`{"stale": false, "verdicts": [{"namespace": "shop", "name": "db1", "allowed": true}]}`, "expected both allowed and known"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := readVerdict([]byte(test.body), candidate{Namespace: "shop", Name: "db1"})
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want it to say %q", err, test.says)
			}
		})
	}
}
