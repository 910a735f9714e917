{{/* The server's configuration file. What the chart itself decides is not open to `server`: the schema refuses it. */}}

{{- define "slipstream.config" -}}
{{- $config := dict
  "model" (include "slipstream.model" .)
  "served-model-name" (include "slipstream.servedName" .)
  "host" "0.0.0.0"
  "port" 50051
  "metrics-port" 9090
  "log-format" "json"
  "drain-delay" .Values.drain.delaySeconds
  "grace" .Values.drain.graceSeconds
-}}
{{- $speculators := list -}}
{{- range .Values.speculators -}}
{{- $options := dict -}}
{{- range $name, $value := .options -}}
{{- $_ := set $options $name (include "slipstream.text" $value) -}}
{{- end -}}
{{- $speculators = append $speculators (mustMerge (dict "options" $options) (omit . "options")) -}}
{{- end -}}
{{- with $speculators -}}
{{- $_ := set $config "speculators" . -}}
{{- end -}}
{{- if and (eq .Values.model.source "hub") .Values.model.hub.revision -}}
{{- $_ := set $config "revision" .Values.model.hub.revision -}}
{{- end -}}
{{- if eq (int .Values.gpu.count) 0 -}}
{{- $_ := set $config "device" "cpu" -}}
{{- $_ := set $config "kv-cache-memory" "1GiB" -}}
{{- end -}}
{{- $security := include "slipstream.securityConfig" . | fromYaml -}}
{{- toYaml (merge (deepCopy .Values.server) $config $security) -}}
{{- end -}}
