{{/* The server's container. */}}

{{- define "slipstream.serverContainer" -}}
- name: server
  image: {{ include "slipstream.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - serve
    - --config=/etc/slipstream/config.yaml
    {{- with .Values.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: grpc
      containerPort: 50051
    - name: metrics
      containerPort: 9090
    {{- if .Values.tls.enabled }}
    - name: health
      containerPort: 50052
    {{- end }}
    {{- if .Values.admin.enabled }}
    - name: admin
      containerPort: 50053
    {{- end }}
  env: {{- include "slipstream.serverEnv" . | nindent 4 }}
  {{- with .Values.extraEnvFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  startupProbe: {{- include "slipstream.probe" (dict "root" $ "service" "readiness" "timing" .Values.probes.startup) | nindent 4 }}
  readinessProbe: {{- include "slipstream.probe" (dict "root" $ "service" "readiness" "timing" .Values.probes.readiness) | nindent 4 }}
  livenessProbe: {{- include "slipstream.probe" (dict "root" $ "service" "liveness" "timing" .Values.probes.liveness) | nindent 4 }}
  {{- if .Values.drain.preStopSeconds }}
  lifecycle:
    preStop:
      sleep:
        seconds: {{ .Values.drain.preStopSeconds }}
  {{- end }}
  securityContext: {{- toYaml .Values.securityContext | nindent 4 }}
  resources: {{- include "slipstream.resources" . | nindent 4 }}
  volumeMounts:
    - name: config
      mountPath: /etc/slipstream
      readOnly: true
    - name: tmp
      mountPath: /tmp
    - name: shm
      mountPath: /dev/shm
    {{- include "slipstream.modelMounts" . | nindent 4 }}
    {{- with include "slipstream.securityMounts" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "slipstream.serverEnv" -}}
{{- $cache := include "slipstream.cacheDir" . -}}
- name: HOME
  value: {{ $cache }}
- name: HF_HOME
  value: {{ $cache }}/huggingface
- name: TRITON_CACHE_DIR
  value: {{ $cache }}/triton
{{- if and (eq (int .Values.gpu.count) 0) (not (hasKey .Values.server "num-threads")) }}
- name: SLIPSTREAM_NUM_THREADS # torch would count the cores of the node
  valueFrom:
    resourceFieldRef:
      containerName: server
      resource: limits.cpu
{{- end }}
{{- if .Values.model.hub.tokenSecret.name }}
- name: HF_TOKEN_PATH # as a file: an environment is seen by whoever may look at the pod
  value: /etc/hub/token
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "slipstream.probe" -}}
grpc:
  port: {{ ternary 50052 50051 .root.Values.tls.enabled }}
  service: {{ .service }}
{{ toYaml .timing }}
{{- end -}}

{{- define "slipstream.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if gt (int .Values.gpu.count) 0 -}}
{{- $gpus := dict .Values.gpu.resourceName (.Values.gpu.count | int) -}}
{{- $_ := set $resources "limits" (merge $gpus (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
