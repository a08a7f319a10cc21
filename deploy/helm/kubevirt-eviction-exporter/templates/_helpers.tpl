{{/* Names are fixed, because runbooks, alerts and dashboards use them. Install the chart once per cluster. */}}
{{- define "name" -}}kubevirt-eviction-exporter{{- end }}

{{- define "labels" -}}
{{- include "labelsAnd" (dict "root" . "more" dict) }}
{{- end }}

{{/* The labels of an object; our own cannot be replaced by `more` or by `commonLabels`. */}}
{{- define "labelsAnd" -}}
{{- $own := dict
  "app.kubernetes.io/name" (include "name" .root)
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/part-of" "kubevirt"
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
{{- merge $own .more .root.Values.commonLabels | toYaml }}
{{- end }}

{{- define "selector" -}}
app.kubernetes.io/name: {{ include "name" . }}
{{- end }}

{{- define "tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "name" .)) }}
{{- end }}

{{- define "image" -}}
{{- if .image.digest -}}
image: {{ .image.repository }}@{{ .image.digest }}
{{- else -}}
image: {{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- with .image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- define "serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "name" .) }}
{{- end }}

{{- define "replicas" -}}
{{- if kindIs "invalid" .Values.replicas }}{{ eq .Values.mode "standalone" | ternary 2 1 }}{{ else }}{{ .Values.replicas }}{{ end }}
{{- end }}

{{/* Values that do not fit the mode are refused before anything is installed. */}}
{{- define "check" -}}
{{- if and (not .Values.tls.enabled) (ne .Values.mode "metrics") }}
{{- fail (printf "tls.enabled=false needs mode=metrics, not mode=%s" .Values.mode) }}
{{- end }}
{{- if and .Values.admission.enabled (ne .Values.mode "standalone") }}
{{- fail (printf "admission.enabled needs mode=standalone, not mode=%s" .Values.mode) }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") .Values.descheduler.policy (not (contains "KubeVirtVerdicts" (include "policy" .))) }}
{{- fail "descheduler.policy: expected the plugin KubeVirtVerdicts in a profile; without it, the descheduler asks for no verdict" }}
{{- end }}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) }}
{{- fail "serviceAccount.name: expected the name of an existing account, because serviceAccount.create is false" }}
{{- end }}
{{- end }}

{{/* What the exporter does with EvictionRequests: "" for nothing, else observe or respond. */}}
{{- define "requests" -}}
{{- ((include "config" . | fromYaml).evictionRequests | default dict).mode | default "" | trimPrefix "off" }}
{{- end }}

{{- define "variant" -}}
{{- if .Values.admission.enabled }}admission{{ else if .Values.tls.enabled }}{{ .Values.mode }}{{ else }}plain{{ end }}
{{- end }}

{{/* The configuration of the mode: the file that kustomize uses, overridden by `config`. */}}
{{- define "config" -}}
{{- $config := .Files.Get (printf "files/config/%s.yaml" (include "variant" .)) | fromYaml }}
{{- if .Values.admission.enabled }}
{{- $_ := set $config "admission" (pick .Values.admission "mode" "users" "observe") }}
{{- end }}
{{- if .Values.events.enabled }}
{{- $_ := set $config "events" true }}
{{- end }}
{{- if .Values.evictionRequests.mode }}
{{- $_ := set $config "evictionRequests" .Values.evictionRequests }}
{{- end }}
{{- mergeOverwrite $config (deepCopy .Values.config) | toYaml }}
{{- end }}

{{- define "policy" -}}
{{- if .Values.descheduler.policy }}{{ toYaml .Values.descheduler.policy }}{{ else }}{{ .Files.Get "files/policy.yaml" }}{{ end }}
{{- end }}

{{/* A name with a hash, because both programs read their configuration only at their start. */}}
{{- define "configName" -}}
{{ include "name" . }}-config-{{ include "config" . | sha256sum | trunc 10 }}
{{- end }}

{{- define "policyName" -}}
{{ include "name" . }}-descheduler-{{ include "policy" . | sha256sum | trunc 10 }}
{{- end }}

{{/* Where the runbooks are: `links.runbooks` of the settings, else the exporter's own Service. */}}
{{- define "runbooks" -}}
{{- $own := printf "%s://%s.%s.svc:9811/runbooks/{alert}" (.Values.tls.enabled | ternary "https" "http") (include "name" .) .Release.Namespace }}
{{- .Values.config.links | default dict | dig "runbooks" "" | default $own }}
{{- end }}

{{/* The rules of the file, without the disabled alerts, and with the chosen labels and runbook URLs. */}}
{{- define "rules" -}}
{{- $values := .values }}
{{- $unknown := $values.disabled }}
{{- $untuned := $values.alerts | default dict | keys }}
{{- range $group := .spec.groups }}
{{- $kept := list }}
{{- range $rule := $group.rules }}
{{- if $rule.alert }}
{{- if $rule.labels.namespace }}
{{- $_ := set $rule.labels "namespace" $.namespace }}
{{- end }}
{{- with get ($values.alerts | default dict) $rule.alert }}
{{- $untuned = without $untuned $rule.alert }}
{{- $_ := set $rule "for" (.for | default $rule.for) }}
{{- $_ := set $rule.labels "severity" (.severity | default $rule.labels.severity) }}
{{- with .threshold }}
{{- if not (has $rule.alert (list "KubeVirtEvacuationsStuckMany" "KubeVirtDeschedulerSlotsHeld")) }}
{{- fail (printf "prometheusRule.alerts.%s: this alert has no threshold" $rule.alert) }}
{{- end }}
{{- $_ := set $rule "expr" (regexReplaceAll ">= [0-9]+(\\s*)$" $rule.expr (printf ">= %d${1}" (int .))) }}
{{- end }}
{{- end }}
{{- $_ := set $rule "labels" (merge dict $values.additionalRuleLabels $rule.labels) }}
{{- $step := regexFind "#.*" $rule.annotations.runbook_url }}
{{- $_ := set $rule.annotations "runbook_url" (print (replace "{alert}" $rule.alert $.runbooks) $step) }}
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
{{- with $untuned }}
{{- fail (printf "prometheusRule.alerts: there is no alert %s; docs/reference.md lists the alerts" (join ", " (sortAlpha .))) }}
{{- end }}
{{- toYaml .spec }}
{{- end }}

{{- define "probe" -}}
httpGet: {path: {{ .path }}, port: metrics, scheme: {{ .root.Values.tls.enabled | ternary "HTTPS" "HTTP" }}}
{{- end }}
