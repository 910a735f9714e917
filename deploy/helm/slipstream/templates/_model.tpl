{{/* Where the model comes from: what the server is told, and which volumes that takes. */}}

{{- define "slipstream.cacheDir" -}}/var/cache/slipstream{{- end -}}

{{/* `model`, as the server understands it: a path or a hub id. */}}
{{- define "slipstream.model" -}}
{{- with .Values.model -}}
{{- if eq .source "known" -}}
{{ include "slipstream.cacheDir" $ }}/{{ .known.name }}.gguf
{{- else if eq .source "hub" -}}
{{ .hub.id }}
{{- else if eq .source "volume" -}}
/models/{{ .volume.path | trimPrefix "/" }}
{{- else if .image.reference -}}
/models/{{ .image.path | trimPrefix "/" }}
{{- else -}}
{{ .image.path }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.servedName" -}}
{{- with .Values.model -}}
{{- if .servedName -}}
{{ .servedName }}
{{- else if eq .source "known" -}}
{{ .known.name }}
{{- else -}}
{{ include "slipstream.model" $ | base }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Volumes of the model and the cache; mounts below must match. */}}
{{- define "slipstream.modelVolumes" -}}
- name: cache
{{- if .Values.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.cache.existingClaim }}
{{- else if .Values.cache.ephemeral.enabled }}
  ephemeral:
    volumeClaimTemplate:
      metadata:
        labels: {{- include "slipstream.selectorLabels" . | nindent 10 }}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .Values.cache.ephemeral.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .Values.cache.ephemeral.size }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.sizeLimit }}
{{- end }}
{{- if eq .Values.model.source "volume" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.volume.existingClaim }}
    readOnly: true
{{- else if and (eq .Values.model.source "image") .Values.model.image.reference }}
- name: model
  image:
    reference: {{ .Values.model.image.reference }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- end }}
{{- if .Values.model.hub.tokenSecret.name }}
- name: hub-token
  secret:
    secretName: {{ .Values.model.hub.tokenSecret.name }}
    defaultMode: 0440
    items:
      - key: {{ .Values.model.hub.tokenSecret.key }}
        path: token
{{- end }}
{{- end -}}

{{- define "slipstream.modelMounts" -}}
- name: cache
  mountPath: {{ include "slipstream.cacheDir" . }}
{{- if or (eq .Values.model.source "volume") (and (eq .Values.model.source "image") .Values.model.image.reference) }}
- name: model
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .Values.model.hub.tokenSecret.name }}
- name: hub-token
  mountPath: /etc/hub
  readOnly: true
{{- end }}
{{- end -}}

{{/* Fetches a known model into the cache, which may be shared, and links the file, which keeps its own name, as NAME.gguf. */}}
{{- define "slipstream.fetchContainer" -}}
- name: fetch-model
  image: {{ include "slipstream.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: ["sh", "-ec"]
  args:
    - |
      path=$(python3 -m tools.fetch_model "$MODEL")
      ln -sfn "$path" "$SLIPSTREAM_CACHE/$MODEL.gguf"
  env:
    - name: MODEL
      value: {{ .Values.model.known.name }}
    - name: SLIPSTREAM_CACHE
      value: {{ include "slipstream.cacheDir" . }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.extraEnvFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- toYaml .Values.securityContext | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {cpu: "1", memory: 512Mi}
  volumeMounts:
    - name: cache
      mountPath: {{ include "slipstream.cacheDir" . }}
    - name: tmp
      mountPath: /tmp
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
