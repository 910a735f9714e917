{{/* Certificates, tokens and the admin service: what the server is told, and which volumes that takes. */}}

{{/* The kubelet's probes know no TLS, so the server then answers health checks on a port of their own. */}}
{{- define "slipstream.securityConfig" -}}
{{- if .Values.tls.enabled }}
tls-cert: /etc/tls/tls.crt
tls-key: /etc/tls/tls.key
health-port: 50052
{{- end }}
{{- if .Values.tls.clientCaSecretName }}
tls-client-ca: /etc/client-ca/ca.crt
{{- end }}
{{- if .Values.auth.tokensSecret.name }}
auth-tokens: /etc/tokens/{{ .Values.auth.tokensSecret.key }}
{{- end }}
{{- if .Values.admin.enabled }}
admin-host: {{ ternary "0.0.0.0" "127.0.0.1" .Values.admin.service | quote }}
admin-port: 50053
{{- end }}
{{- end -}}

{{/* No subPath anywhere: a mount of a whole Secret follows its changes. */}}
{{- define "slipstream.securityVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ .Values.tls.secretName }}
    defaultMode: 0440
{{- end }}
{{- if .Values.tls.clientCaSecretName }}
- name: client-ca
  secret:
    secretName: {{ .Values.tls.clientCaSecretName }}
    defaultMode: 0440
    items:
      - key: ca.crt
        path: ca.crt
{{- end }}
{{- if .Values.auth.tokensSecret.name }}
- name: tokens
  secret:
    secretName: {{ .Values.auth.tokensSecret.name }}
    defaultMode: 0440
    items:
      - key: {{ .Values.auth.tokensSecret.key }}
        path: {{ .Values.auth.tokensSecret.key }}
{{- end }}
{{- end -}}

{{- define "slipstream.securityMounts" -}}
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /etc/tls
  readOnly: true
{{- end }}
{{- if .Values.tls.clientCaSecretName }}
- name: client-ca
  mountPath: /etc/client-ca
  readOnly: true
{{- end }}
{{- if .Values.auth.tokensSecret.name }}
- name: tokens
  mountPath: /etc/tokens
  readOnly: true
{{- end }}
{{- end -}}

{{/* A list of the ports that a pod calls besides DNS: HTTPS where something is downloaded, and that of the traces. */}}
{{- define "slipstream.egressPorts" -}}
{{- $downloads := list .Values.server.tokenizer -}}
{{- range .Values.speculators -}}
{{- $downloads = append $downloads .model -}}
{{- end -}}
{{- $isOnline := has .Values.model.source (list "known" "hub") -}}
{{- range compact $downloads -}}
{{- $isOnline = or $isOnline (not (hasPrefix "/" .)) -}}
{{- end -}}
{{- if $isOnline }}
- 443
{{- end }}
{{- with index .Values.server "trace-endpoint" }}
{{- $url := urlParse . }}
- {{ regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}
{{- end -}}

{{/* What the client of `helm test` needs: whom to trust, what to show, a token. Never the server's key. */}}
{{- define "slipstream.testSecrets" -}}
{{- if .Values.tls.enabled }}
- secret:
    name: {{ .Values.tls.secretName }}
    items:
      - key: tls.crt
        path: server.crt
- secret:
    name: {{ .Values.tls.secretName }}
    optional: true
    items:
      - key: ca.crt
        path: ca.crt
{{- end }}
{{- with .Values.test.clientSecretName }}
- secret:
    name: {{ . }}
    items:
      - key: tls.crt
        path: client.crt
      - key: tls.key
        path: client.key
{{- end }}
{{- if .Values.test.tokenSecret.name }}
- secret:
    name: {{ .Values.test.tokenSecret.name }}
    items:
      - key: {{ .Values.test.tokenSecret.key }}
        path: token
{{- end }}
{{- end -}}
