{{- define "proa.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "proa.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* What selects the pods of a component: (dict "root" $ "component" "gateway") */ -}}
{{- define "proa.componentSelector" -}}
{{ include "proa.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- /* What selects the pods of a pool: (dict "root" $ "name" $name) */ -}}
{{- define "proa.poolSelector" -}}
{{ include "proa.componentSelector" (dict "root" .root "component" "engine") }}
proa/pool: {{ .name }}
{{- end -}}

{{- define "proa.labels" -}}
{{ include "proa.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
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

{{- /* The flags of mutual TLS, for gateway and engine alike */ -}}
{{- define "proa.tlsArguments" -}}
- --tls-ca=/etc/proa/tls/ca.crt
- --tls-cert=/etc/proa/tls/tls.crt
- --tls-key=/etc/proa/tls/tls.key
{{- end -}}

{{- /* Topology spread constraints of the pods selected: (dict "constraints" list "selector" "a: b") */ -}}
{{- define "proa.spread" -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (fromYaml .selector)) -}}
{{- range .constraints }}
- {{ merge (deepCopy .) $selector | toJson }}
{{- end }}
{{- end -}}

{{- /* What gateway and engines alike may open: DNS, and OpenTelemetry where it is configured */ -}}
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
