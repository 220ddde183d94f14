{{- /* The fields that pods of gateways and engines have in common. `of` is what configures them: `.Values.gateway` or a pool. */ -}}

{{- /* Labels and annotations: (dict "root" $ "of" .Values.gateway "component" "gateway" "pool" $name "extra" dict) */ -}}
{{- define "proa.podMetadata" -}}
labels: {{- include "proa.labels" (merge (dict "extra" (merge (dict) (.extra | default dict) (.of.podLabels | default dict))) .) | nindent 2 }}
{{- with .of.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* How the pod runs, besides its containers and volumes: (dict "root" $ "of" .Values.gateway "tolerations" list); `tolerations`
are added to the configured ones */ -}}
{{- define "proa.podFields" -}}
enableServiceLinks: false # variables of Services named proa would have the names of Proa's own
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
securityContext: {{- include "proa.withoutNulls" .of.podSecurityContext | nindent 2 }}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat (.of.tolerations | default list) (.tolerations | default list) }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Where the pod runs among its like: (dict "of" .Values.gateway "defaults" dict); `defaults` are fields that a topology spread
constraint has unless it is configured with others */ -}}
{{- define "proa.podPlacement" -}}
{{- with .of.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ merge (deepCopy .) $.defaults | toJson }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Image, environment and security context of a container: (dict "root" $ "of" .Values.gateway "image" $image "service" "proa-gateway"
"env" list "readOnly" true). `env` has the chart's own variables, which configured ones replace: server-side apply, as of Helm 4, refuses
a name that occurs twice. `readOnly` is the default of readOnlyRootFilesystem, if the configuration has none. */ -}}
{{- define "proa.containerFields" -}}
image: {{ .image }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError # `kubectl describe` shows why a container failed
securityContext:
  {{- $default := ternary (dict "readOnlyRootFilesystem" .readOnly) dict (hasKey . "readOnly") }}
  {{- include "proa.withoutNulls" (mergeOverwrite $default (deepCopy (.of.securityContext | default dict))) | nindent 2 }}
{{- $names := list -}}
{{- range .of.env }}{{ $names = append $names .name }}{{ end }}
env:
  {{- range concat (list (dict "name" "HOME" "value" "/tmp")) (.env | default list) (include "proa.otel" . | fromYamlArray) }}
  {{- if not (has .name $names) }}
  - {{ toJson . }}
  {{- end }}
  {{- end }}
  {{- with .of.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .of.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
