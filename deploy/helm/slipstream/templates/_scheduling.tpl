{{/* Where pods may run. */}}

{{- define "slipstream.scheduling" -}}
{{- $parts := dict -}}
{{- range $key := list "imagePullSecrets" "runtimeClassName" "priorityClassName" "nodeSelector" -}}
{{- with index $.Values $key -}}
{{- $_ := set $parts $key . -}}
{{- end -}}
{{- end -}}
{{- with include "slipstream.tolerations" . | fromYamlArray -}}
{{- $_ := set $parts "tolerations" . -}}
{{- end -}}
{{- with include "slipstream.affinity" . | fromYaml -}}
{{- $_ := set $parts "affinity" . -}}
{{- end -}}
{{- $selector := dict "matchLabels" (include "slipstream.selectorLabels" . | fromYaml) -}}
{{- $spread := list -}}
{{- range .Values.topologySpreadConstraints -}}
{{- $spread = append $spread (merge (deepCopy .) (dict "labelSelector" $selector)) -}}
{{- end -}}
{{- with $spread -}}
{{- $_ := set $parts "topologySpreadConstraints" . -}}
{{- end -}}
{{- if $parts -}}
{{- toYaml $parts -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.tolerations" -}}
{{- $tolerations := .Values.tolerations -}}
{{- if and (gt (int .Values.gpu.count) 0) .Values.gpu.tolerate -}}
{{- $tolerations = append $tolerations (dict "key" .Values.gpu.resourceName "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- toYaml $tolerations -}}
{{- end -}}

{{/* Nodes by GPU product, unless the user's own affinity says something of nodes. */}}
{{- define "slipstream.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- if and .Values.gpu.products (gt (int .Values.gpu.count) 0) (not (hasKey $affinity "nodeAffinity")) -}}
{{- $expression := dict "key" "nvidia.com/gpu.product" "operator" "In" "values" .Values.gpu.products -}}
{{- $terms := list (dict "matchExpressions" (list $expression)) -}}
{{- $required := dict "nodeSelectorTerms" $terms -}}
{{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $required) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}
