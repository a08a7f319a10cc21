# `pint --offline --config alerts/pint.hcl lint alerts/rules.yaml` checks KubeVirt's conventions,
# and that every rule aggregates over the replicas.
rule {
  match {
    kind = "recording"
  }
  name "(vmi|node|target|source|cluster):[a-z_]+:(max|rate5m|increase1h|timestamp)" {
    severity = "bug"
    comment  = "level:metric:operation"
  }
}

rule {
  match {
    kind = "alerting"
  }
  name "KubeVirt[A-Za-z]{1,42}" {
    severity = "bug"
    comment  = "PascalCase, at most 50 characters"
  }
  label "severity" {
    severity = "bug"
    value    = "critical|warning|info"
    required = true
  }
  label "operator_health_impact" {
    severity = "bug"
    value    = "none"
    required = true
  }
  label "kubernetes_operator_part_of" {
    severity = "bug"
    value    = "kubevirt"
    required = true
  }
  label "kubernetes_operator_component" {
    severity = "bug"
    value    = "kubevirt-eviction-exporter"
    required = true
  }
  annotation "summary" {
    severity = "bug"
    required = true
  }
  annotation "description" {
    severity = "bug"
    required = true
  }
  annotation "runbook_url" {
    severity = "bug"
    value    = "https://.+/runbooks/{{ $alert }}(#.+)?"
    required = true
  }
}

rule {
  match {
    kind = "alerting"
  }
  ignore {
    name = "KubeVirtNodeCannotBeEmptied"
  }
  for {
    severity = "bug"
    min      = "1m"
    max      = "30m"
  }
}

rule {
  aggregate ".+" {
    severity = "bug"
    strip    = ["instance", "pod", "container", "endpoint", "job"]
  }
}

# Series of several clusters have a label `cluster`. Every rule must keep it.
rule {
  aggregate ".+" {
    severity = "bug"
    keep     = ["cluster"]
  }
}
