{{/* Names are fixed: there is one installation in a cluster, and runbooks, alerts and dashboards find it by them. */}}
{{- define "name" -}}kubevirt-eviction-exporter{{- end }}

{{- define "labels" -}}
app.kubernetes.io/name: {{ include "name" . }}
app.kubernetes.io/part-of: kubevirt
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "selector" -}}
app.kubernetes.io/name: {{ include "name" . }}
{{- end }}

{{- define "tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "name" .)) }}
{{- end }}

{{- define "image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* What the modes do not have together is refused before anything is installed. */}}
{{- define "check" -}}
{{- if and (not .Values.tls.enabled) (ne .Values.mode "metrics") }}
{{- fail (printf "tls.enabled=false goes with mode=metrics only, not with mode=%s" .Values.mode) }}
{{- end }}
{{- if and .Values.admission.enabled (ne .Values.mode "standalone") }}
{{- fail (printf "admission.enabled goes with mode=standalone only, not with mode=%s" .Values.mode) }}
{{- end }}
{{- end }}

{{- define "variant" -}}
{{- if .Values.admission.enabled }}admission{{ else if .Values.tls.enabled }}{{ .Values.mode }}{{ else }}plain{{ end }}
{{- end }}

{{/* The configuration of the mode, which is the file that kustomize uses, with `config` over it. */}}
{{- define "config" -}}
{{- $config := .Files.Get (printf "files/config/%s.yaml" (include "variant" .)) | fromYaml }}
{{- if .Values.admission.enabled }}
{{- $_ := set $config "admission" (pick .Values.admission "mode" "users" "observe") }}
{{- end }}
{{- if .Values.events.enabled }}
{{- $_ := set $config "events" true }}
{{- end }}
{{- mergeOverwrite $config (deepCopy .Values.config) | toYaml }}
{{- end }}

{{- define "policy" -}}
{{- if .Values.descheduler.policy }}{{ toYaml .Values.descheduler.policy }}{{ else }}{{ .Files.Get "files/policy.yaml" }}{{ end }}
{{- end }}

{{/* A name with a hash: both programs read their configuration only at start. */}}
{{- define "configName" -}}
{{ include "name" . }}-config-{{ include "config" . | sha256sum | trunc 10 }}
{{- end }}

{{- define "policyName" -}}
{{ include "name" . }}-descheduler-{{ include "policy" . | sha256sum | trunc 10 }}
{{- end }}

{{/* The rules of the file, without the alerts that are disabled, with the labels and runbooks that were chosen. */}}
{{- define "rules" -}}
{{- $values := .values }}
{{- $unknown := $values.disabled }}
{{- range $group := .spec.groups }}
{{- $kept := list }}
{{- range $rule := $group.rules }}
{{- if $rule.alert }}
{{- $_ := set $rule "labels" (merge dict $values.additionalRuleLabels $rule.labels) }}
{{- with $values.runbookUrlPrefix }}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s.md" (trimSuffix "/" .) $rule.alert) }}
{{- end }}
{{- end }}
{{- if has $rule.alert $values.disabled }}
{{- $unknown = without $unknown $rule.alert }}
{{- else }}
{{- $kept = append $kept $rule }}
{{- end }}
{{- end }}
{{- $_ := set $group "rules" $kept }}
{{- end }}
{{- with $unknown }}
{{- fail (printf "prometheusRule.disabled: there is no alert %s; docs/reference.md lists the alerts" (join ", " .)) }}
{{- end }}
{{- toYaml .spec }}
{{- end }}

{{- define "probe" -}}
httpGet: {path: {{ .path }}, port: metrics, scheme: {{ .root.Values.tls.enabled | ternary "HTTPS" "HTTP" }}}
{{- end }}
