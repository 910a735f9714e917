{{/* The sidecar that ends TLS. A native sidecar: it starts before the server and is stopped after it, so that streams
which drain keep their connection. */}}

{{- define "slipstream.envoyContainer" -}}
- name: tls
  image: {{ .Values.tls.image }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args: [--config-path, /etc/envoy/envoy.yaml, --disable-hot-restart, --log-level, warning]
  ports:
    - name: grpcs
      containerPort: 50052
  startupProbe:
    tcpSocket:
      port: grpcs
    periodSeconds: 1
    failureThreshold: 60
  securityContext: {{- toYaml .Values.securityContext | nindent 4 }}
  resources: {{- toYaml .Values.tls.resources | nindent 4 }}
  volumeMounts:
    - name: envoy
      mountPath: /etc/envoy
      readOnly: true
    - name: tls
      mountPath: /etc/tls
      readOnly: true
{{- end -}}

{{- define "slipstream.envoyVolumes" -}}
- name: envoy
  configMap:
    name: {{ include "slipstream.fullname" . }}-envoy
- name: tls
  secret:
    secretName: {{ .Values.tls.secretName }}
{{- end -}}

{{/* TLS on 50052, the server on 127.0.0.1:50051. No timeout of its own: a generation takes as long as its client lets
it. The certificate comes by a file of the secret discovery service, which is what reloads it. */}}
{{- define "slipstream.envoyConfig" -}}
envoy.yaml: |
  node: {id: slipstream, cluster: slipstream}
  static_resources:
    listeners:
      - name: grpcs
        address: {socket_address: {address: 0.0.0.0, port_value: 50052}}
        filter_chains:
          - transport_socket:
              name: envoy.transport_sockets.tls
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
                common_tls_context:
                  tls_params: {tls_minimum_protocol_version: TLSv1_2}
                  alpn_protocols: [h2]
                  tls_certificate_sds_secret_configs:
                    - name: server
                      sds_config:
                        resource_api_version: V3
                        path_config_source: {path: /etc/envoy/certificate.yaml}
            filters:
              - name: envoy.filters.network.http_connection_manager
                typed_config:
                  "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                  stat_prefix: grpcs
                  codec_type: HTTP2
                  stream_idle_timeout: 0s
                  http_filters:
                    - name: envoy.filters.http.router
                      typed_config:
                        "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
                  route_config:
                    virtual_hosts:
                      - name: server
                        domains: ["*"]
                        routes:
                          - match: {prefix: /}
                            route: {cluster: server, timeout: 0s}
    clusters:
      - name: server
        connect_timeout: 1s
        typed_extension_protocol_options:
          envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
            "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
            explicit_http_config: {http2_protocol_options: {}}
        load_assignment:
          cluster_name: server
          endpoints:
            - lb_endpoints:
                - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 50051}}}
certificate.yaml: |
  resources:
    - "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret
      name: server
      tls_certificate:
        certificate_chain: {filename: /etc/tls/tls.crt}
        private_key: {filename: /etc/tls/tls.key}
        watched_directory: {path: /etc/tls}
{{- end -}}
