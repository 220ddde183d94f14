{{- define "proa.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $full -}}
{{- end -}}

{{- /* Labels that select the pods of a component, of a pool, or of a component of a pool:
(dict "root" $ "component" "engine" "pool" $name) */ -}}
{{- define "proa.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
proa/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* Labels of an object; the chart's own take precedence. Arguments as above, and "extra": further labels */ -}}
{{- define "proa.labels" -}}
{{- $chart := printf "%s-%s" .root.Chart.Name .root.Chart.Version -}}
{{- $own := dict "helm.sh/chart" $chart "app.kubernetes.io/managed-by" .root.Release.Service "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- toYaml (merge (fromYaml (include "proa.selector" .)) $own (.extra | default dict) .root.Values.commonLabels) -}}
{{- end -}}

{{- define "proa.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (printf "%s-gateway" (include "proa.fullname" .)) -}}
{{- end -}}

{{- /* proa.image: (dict "root" $ "image" .Values.gateway.image) */ -}}
{{- define "proa.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{- define "proa.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Resource requests and limits without null entries, with which a values file removes defaults */ -}}
{{- define "proa.resources" -}}
{{- $resources := dict -}}
{{- range $kind, $amounts := . -}}
{{- $kept := dict -}}
{{- range $name, $amount := $amounts -}}
{{- if not (kindIs "invalid" $amount) }}{{ $_ := set $kept $name $amount }}{{ end -}}
{{- end -}}
{{- $_ := set $resources $kind $kept -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "proa.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "proa.containerSecurityContext" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* proa.otel: (dict "root" $ "service" "proa-gateway") */ -}}
{{- define "proa.otel" -}}
{{- range $name, $value := merge (dict) .root.Values.otel (dict "OTEL_SERVICE_NAME" .service) -}}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{ end }}
{{- end -}}

{{- /* The mutual TLS flags, which gateway and engine share */ -}}
{{- define "proa.tlsArguments" -}}
- --tls-ca=/etc/proa/tls/ca.crt
- --tls-cert=/etc/proa/tls/tls.crt
- --tls-key=/etc/proa/tls/tls.key
{{- end -}}

{{- /* Topology spread constraints with default fields added: (dict "constraints" list "defaults" dict) */ -}}
{{- define "proa.spread" -}}
{{- range .constraints }}
- {{ merge (deepCopy .) $.defaults | toJson }}
{{- end }}
{{- end -}}

{{- /* Egress rules of gateway and engines: DNS, and OpenTelemetry if configured */ -}}
{{- define "proa.commonEgress" -}}
- ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- if .Values.otel }}
- ports:
    {{- range .Values.networkPolicy.otlp.ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- with .Values.networkPolicy.otlp.to }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Egress rules of all engine pods */ -}}
{{- define "proa.engine.egress" -}}
{{- include "proa.commonEgress" . }}
{{- with .Values.networkPolicy.engine.egress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Arguments of the gateway for images. Context: gateway.images */ -}}
{{- define "proa.gateway.imageArguments" -}}
- --image-fetch-timeout={{ .fetchTimeoutSeconds }}
- --max-image-bytes={{ int .maxBytes }}
- --max-image-pixels={{ int .maxPixels }}
- {{ printf "--limit-mm-per-prompt=%s" (dict "image" (int .maxPerPrompt) | toJson) | squote }}
{{- range .allowedMediaDomains }}
- --allowed-media-domains={{ . }}
{{- end }}
{{- end -}}
