{{/* Names, labels and the image. */}}

{{- define "slipstream.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "slipstream.metadata" -}}
name: {{ include "slipstream.fullname" . }}
namespace: {{ .Release.Namespace }}
labels: {{- include "slipstream.labels" . | nindent 2 }}
{{- end -}}

{{- define "slipstream.serviceAccountName" -}}
{{- default (ternary (include "slipstream.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "slipstream.image" -}}
{{- $variant := ternary "cuda" "cpu" (gt (int .Values.gpu.count) 0) -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default (printf "%s-%s" .Chart.AppVersion $variant) .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Seconds that a pod may take to go: preStop, drain, and what the server needs to end its engine (at most 11). */}}
{{- define "slipstream.terminationGracePeriodSeconds" -}}
{{- add .Values.drain.preStopSeconds .Values.drain.delaySeconds .Values.drain.graceSeconds 15 -}}
{{- end -}}

{{/* A text as it is, a number in full: Helm itself writes 2000000 as 2e+06. */}}
{{- define "slipstream.text" -}}
{{- kindIs "string" . | ternary . (toJson .) -}}
{{- end -}}

{{/* A number as a Kubernetes quantity: 0.85 is 850m. */}}
{{- define "slipstream.quantity" -}}
{{- printf "%dm" (round (mulf . 1000) 0 | int) -}}
{{- end -}}
