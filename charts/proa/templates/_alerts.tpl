{{- /* The fields of an alert besides its expression: (list $ "ProaGatewayDown" "1m" "critical" "No gateway can be scraped." dict), which
are the root, name, duration, severity, summary and, optionally, the rule's own labels */ -}}
{{- define "proa.alert" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
alert: {{ $name }}
for: {{ index . 2 }}
labels:
  {{- $labels := dict "severity" (index . 3) "namespace" $root.Release.Namespace "release" $root.Release.Name }}
  {{- if gt (len .) 5 }}{{ $labels = merge $labels (index . 5) }}{{ end }}
  {{- toYaml (mergeOverwrite $labels ($root.Values.prometheusRule.alertLabels | default dict)) | nindent 2 }}
annotations:
  summary: {{ index . 4 | quote }}
  {{- with $root.Values.prometheusRule.runbookUrl }}
  runbook_url: {{ . }}#{{ lower $name }}
  {{- end }}
{{- end -}}

{{- /* The models of all pools: model name in the API -> whether all of its pools may have no pod */ -}}
{{- define "proa.modelsThatMayHaveNoEngine" -}}
{{- $models := dict -}}
{{- range $overrides := .Values.engines | default (dict "builtin" dict) -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.enginePool) (deepCopy $overrides) -}}
{{- $model := include "proa.engine.modelName" $pool -}}
{{- $least := ternary $pool.keda.minReplicas (ternary $pool.autoscaling.minReplicas $pool.replicas ($pool.autoscaling.enabled | default false)) ($pool.keda.enabled | default false) -}}
{{- $_ := set $models $model (and (eq (int $least) 0) (ne (toString (get $models $model)) "false")) -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}
