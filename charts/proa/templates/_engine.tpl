{{- /* What an engine container and its worker containers share: (dict "root" $ "pool" $pool) */ -}}
{{- define "proa.engine.container" -}}
image: {{ include "proa.image" (dict "root" .root "image" .root.Values.engine.image) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "proa.containerSecurityContext" . | nindent 2 }}
  readOnlyRootFilesystem: {{ .pool.readOnlyRootFilesystem }}
resources: {{- toYaml .pool.resources | nindent 2 }}
env:
  - {name: HOME, value: /tmp}
  {{- include "proa.otel" (dict "root" .root "service" "proa-engine") | nindent 2 }}
  {{- with .pool.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  - {name: tmp, mountPath: /tmp}
  - {name: run, mountPath: /run/proa}
  {{- with .pool.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Combinations that cannot work, each refused in a sentence: (dict "name" $name "pool" $pool) */ -}}
{{- define "proa.engine.validate" -}}
{{- $tp := int .pool.tensorParallelSize -}}
{{- $devices := dict -}}
{{- range $key, $_ := merge (dict) (.pool.resources.limits | default dict) (.pool.resources.requests | default dict) -}}
{{- if contains "gpu" $key -}}{{- $_ := set $devices $key true -}}{{- end -}}
{{- end -}}
{{- if and $devices (eq .pool.tensorParallel.mode "sidecar") (gt $tp 1) -}}
{{- fail (printf "engines.%s: tensorParallel.mode sidecar cannot share GPUs between containers through %s; use mode process." .name (keys $devices | first)) -}}
{{- end -}}
{{- if gt (len .name) 20 -}}
{{- fail (printf "engines.%s: the name of a pool may have at most 20 characters." .name) -}}
{{- end -}}
{{- end -}}
