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
{{- toYaml (merge (fromYaml (include "proa.selector" .)) $own (.extra | default dict) (.root.Values.commonLabels | default dict)) -}}
{{- end -}}

{{- define "proa.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (printf "%s-gateway" (include "proa.fullname" .)) -}}
{{- end -}}

{{- /* An image: (dict "root" $ "image" .Values.gateway.image "defaults" dict); `defaults` gives the fields that are empty */ -}}
{{- define "proa.image" -}}
{{- $defaults := .defaults | default dict -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .image.repository | default $defaults.repository }}:{{ coalesce .image.tag $defaults.tag .root.Chart.AppVersion }}
{{- end -}}

{{- /* A map without its null entries, at any depth: with null, a values file removes a default */ -}}
{{- define "proa.withoutNulls" -}}
{{- $kept := dict -}}
{{- range $key, $value := . -}}
{{- if kindIs "map" $value -}}
{{- $_ := set $kept $key (include "proa.withoutNulls" $value | fromYaml) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $kept $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{- /* proa.otel: (dict "root" $ "service" "proa-gateway") */ -}}
{{- define "proa.otel" -}}
{{- range $name, $value := merge (dict) (.root.Values.otel | default dict) (dict "OTEL_SERVICE_NAME" .service) -}}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{ end }}
{{- end -}}

{{- /* The mutual TLS flags, which gateway and engine share */ -}}
{{- define "proa.tlsArguments" -}}
- --tls-ca=/etc/proa/tls/ca.crt
- --tls-cert=/etc/proa/tls/tls.crt
- --tls-key=/etc/proa/tls/tls.key
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

{{- /* Arguments of the gateway for images and audio files. Context: gateway */ -}}
{{- define "proa.gateway.mediaArguments" -}}
{{- with .images -}}
- --image-fetch-timeout={{ .fetchTimeoutSeconds }}
- --max-image-bytes={{ int .maxBytes }}
- --max-image-pixels={{ int .maxPixels }}
{{- range .allowedMediaDomains }}
- --allowed-media-domains={{ . }}
{{- end }}
{{- end }}
{{- $limits := dict "image" (int .images.maxPerPrompt) "audio" (int .audio.maxPerPrompt) }}
- {{ printf "--limit-mm-per-prompt=%s" ($limits | toJson) | squote }}
{{- with .audio }}
- --max-audio-bytes={{ int .maxBytes }}
- --max-audio-seconds={{ int .maxSeconds }}
- --max-audio-memory={{ int .maxMemoryBytes }}
- --audio-processes={{ int .processes }}
- --audio-decode-timeout={{ .decodeTimeoutSeconds }}
{{- end }}
{{- end -}}

{{- /* The names under which clients reach the gateway. Without hosts, an Ingress and an HTTPRoute have any. Context: $ */ -}}
{{- define "proa.gateway.hostArguments" -}}
{{- $service := printf "%s-gateway.%s" (include "proa.fullname" .) .Release.Namespace -}}
{{- $hosts := list $service (printf "%s.svc" $service) (printf "%s.svc.cluster.local" $service) -}}
{{- with .Values.gateway.ingress }}{{- if .enabled }}{{- $hosts = concat $hosts (.hosts | default (list "*")) }}{{- end }}{{- end }}
{{- with .Values.gateway.httpRoute }}{{- if .enabled }}{{- $hosts = concat $hosts (.hostnames | default (list "*")) }}{{- end }}{{- end }}
{{- range concat $hosts (.Values.gateway.allowedHosts | default list) | uniq }}
- --allowed-hosts={{ . }}
{{- end }}
{{- end -}}

{{- /* The arguments of both programs for their logs. Context: `gateway` or a pool */ -}}
{{- define "proa.logArguments" -}}
- --log-level={{ .logLevel }}
- --log-format={{ .logFormat }}
{{- end -}}
