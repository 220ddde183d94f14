{{- /* The pod template of a pool: (dict "root" $ "name" $name "pool" $pool "component" "engine"). Component `engine` serves gRPC;
`engine-worker` is a further node of an engine, which computes for it and serves nothing. */ -}}
{{- define "proa.engine.podTemplate" -}}
{{- $pool := .pool -}}
{{- $serves := eq .component "engine" -}}
{{- $workers := ternary (int (include "proa.engine.ranks" $pool)) 1 (eq $pool.tensorParallel.mode "sidecar") -}}
{{- $onGpus := ne $pool.gpu.allocation "none" -}}
{{- $extra := dict "proa/role" $pool.role "proa/model" (include "proa.engine.modelLabel" $pool) -}}
metadata: {{- include "proa.podMetadata" (dict "root" .root "of" $pool "component" .component "pool" .name "extra" $extra) | nindent 2 }}
spec:
  {{- with $pool.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  automountServiceAccountToken: false
  {{- $gpuTaint := list (dict "key" $pool.gpu.resourceName "operator" "Exists") }}
  {{- include "proa.podFields" (dict "root" .root "of" $pool "tolerations" (ternary $gpuTaint list $onGpus)) | nindent 2 }}
  {{- with include "proa.podPlacement" (dict "of" $pool "defaults" (include "proa.engine.spreadDefaults" $ | fromYaml)) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if and $onGpus (gt $workers 1) }}
  shareProcessNamespace: true # ranks map each other's GPU memory, which needs a shared PID namespace
  {{- end }}
  {{- if eq $pool.gpu.allocation "dra" }}
  resourceClaims:
    - {name: gpus, resourceClaimTemplateName: {{ include "proa.engine.claimTemplate" . }}}
  {{- end }}
  {{- /* the engine drains, then its workers stop */}}
  terminationGracePeriodSeconds: {{ add (int $pool.drainSeconds) 15 }}
  {{- if or $pool.initContainers (include "proa.engine.downloads" $pool) (gt $workers 1) }}
  initContainers:
    {{- with $pool.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if include "proa.engine.downloads" $pool }}
    - name: download # before the container whose time to start is limited
      args: {{- include "proa.engine.arguments" (merge (dict "command" "download" "component" "engine") .) | nindent 8 }}
      {{- include "proa.engine.container" . | nindent 6 }}
    {{- end }}
    {{- /* no probes: rank 0 waits for the workers, and its health includes theirs */}}
    {{- range $rank := untilStep 1 $workers 1 }}
    - name: tp-worker-{{ $rank }}
      restartPolicy: Always
      args:
        - worker
        - --rank={{ $rank }}
        - --tensor-parallel-size={{ $pool.tensorParallelSize }}
        {{- if gt (int $pool.pipelineParallelSize) 1 }}
        - --pipeline-parallel-size={{ $pool.pipelineParallelSize }}
        {{- end }}
        - --socket=/run/proa/rank-{{ $rank }}.sock
        {{- include "proa.logArguments" $pool | nindent 8 }}
      {{- if $pool.kvTransfer.enabled }}
      ports: {{- include "proa.engine.kvPorts" (dict "root" $.root "ranks" (list $rank)) | nindent 8 }}
      {{- end }}
      {{- include "proa.engine.container" $ | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: engine
      args: {{- include "proa.engine.arguments" . | nindent 8 }}
        {{- range $rank := untilStep 1 $workers 1 }}
        - --worker-socket=/run/proa/rank-{{ $rank }}.sock
        {{- end }}
      {{- if $serves }}
      {{- include "proa.engine.served" . | nindent 6 }}
      {{- end }}
      {{- include "proa.engine.container" . | nindent 6 }}
  volumes: {{- include "proa.engine.volumes" . | nindent 4 }}
{{- end -}}

{{- /* The arguments of `proa-engine serve`, the same on every node of an engine but for --node-rank. Arguments as above, and "command":
another command that takes the flags of `serve` */ -}}
{{- define "proa.engine.arguments" -}}
- {{ .command | default "serve" }}
- --model={{ .pool.model }}
{{- if or .pool.servedModelName .pool.servedModelAliases }}
- --served-model-name={{ include "proa.engine.modelName" .pool }}
{{- end }}
{{- range .pool.servedModelAliases }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
- --port={{ .root.Values.engine.port }}
- --metrics-port={{ .root.Values.engine.metricsPort }}
- --health-port={{ .root.Values.engine.healthPort }}
- --drain-timeout={{ .pool.drainSeconds }}
{{ include "proa.logArguments" .pool }}
- --device={{ ternary "cpu" "cuda" (eq .pool.gpu.allocation "none") }}
- --tensor-parallel-size={{ .pool.tensorParallelSize }}
{{- if gt (int .pool.pipelineParallelSize) 1 }}
- --pipeline-parallel-size={{ .pool.pipelineParallelSize }}
{{- end }}
{{- if .pool.expertParallel }}
- --enable-expert-parallel
{{- end }}
{{- if gt (int .pool.nodes) 1 }}
- --nnodes={{ .pool.nodes }}
- --node-rank={{ ternary "0" "$(LWS_WORKER_INDEX)" (eq .component "engine") }}
- --master-addr=$(LWS_LEADER_ADDRESS)
- --master-port={{ .root.Values.engine.masterPort }}
{{- end }}
{{- if .pool.lora.enabled }}
{{ include "proa.engine.loraArguments" .pool }}
{{- end }}
{{ include "proa.engine.imageArguments" .pool }}
{{- with include "proa.engine.kvArguments" . | trim }}
{{ . }}
{{- end }}
{{- if .pool.compileCache.claimName }}
- --compile-cache=/compile-cache
{{- end }}
{{- with .root.Values.tls.existingSecret }}
{{ include "proa.tlsArguments" . }}
{{- end }}
{{- range .pool.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* Ports and probes of the container that serves. Arguments as above */ -}}
{{- define "proa.engine.served" -}}
ports:
  - {name: grpc, containerPort: {{ .root.Values.engine.port }}}
  - {name: metrics, containerPort: {{ .root.Values.engine.metricsPort }}}
  - {name: health, containerPort: {{ .root.Values.engine.healthPort }}}
  {{- if .pool.kvTransfer.enabled }}
  {{- include "proa.engine.kvPorts" (dict "root" .root "ranks" (until (int (include "proa.engine.containerRanks" .pool)))) | nindent 2 }}
  {{- end }}
startupProbe:
  grpc: {port: {{ .root.Values.engine.healthPort }}, service: startup}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div (add (int .pool.startupSeconds) 1) 2 }}
livenessProbe:
  grpc: {port: {{ .root.Values.engine.healthPort }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
readinessProbe:
  grpc: {port: {{ .root.Values.engine.healthPort }}}
  periodSeconds: 2
  timeoutSeconds: 2
{{- end -}}

{{- /* The fields that topology spread constraints of a pool have by default: its pods, and with several nodes those of one group */ -}}
{{- define "proa.engine.spreadDefaults" -}}
labelSelector:
  matchLabels: {{- include "proa.selector" (dict "root" .root "pool" .name) | nindent 4 }}
{{- if gt (int .pool.nodes) 1 }}
matchLabelKeys: [leaderworkerset.sigs.k8s.io/group-key]
{{- end }}
{{- end -}}

{{- /* What a HorizontalPodAutoscaler or ScaledObject scales. Arguments as above */ -}}
{{- define "proa.engine.scaleTarget" -}}
{{- $group := gt (int .pool.nodes) 1 -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" $group }}
kind: {{ ternary "LeaderWorkerSet" "Deployment" $group }}
name: {{ include "proa.fullname" .root }}-engine-{{ .name }}
{{- end -}}
