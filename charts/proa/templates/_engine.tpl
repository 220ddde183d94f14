{{- /* Fields shared by the engine and worker containers: (dict "root" $ "pool" $pool) */ -}}
{{- define "proa.engine.container" -}}
{{- $image := include "proa.image" (dict "root" .root "image" .pool.image "defaults" .root.Values.engine.image) -}}
{{- $env := list (dict "name" "HF_HOME" "value" "/cache") -}}
{{- with .pool.huggingFace.tokenSecret -}}
{{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" . "key" $.pool.huggingFace.tokenKey))) -}}
{{- end -}}
{{- $onCpus := eq .pool.gpu.allocation "none" -}}
{{- include "proa.containerFields" (dict "root" .root "of" .pool "image" $image "service" "proa-engine" "env" $env "readOnly" $onCpus) }}
resources: {{- include "proa.engine.resources" .pool | nindent 2 }}
volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  - {name: tmp, mountPath: /tmp}
  - {name: run, mountPath: /run/proa}
  - {name: cache, mountPath: /cache}
  {{- if .pool.diskCache.sizeGb }}
  - {name: kv-disk, mountPath: /kv-disk}
  {{- end }}
  {{- if .pool.compileCache.claimName }}
  - {name: compile-cache, mountPath: /compile-cache}
  {{- end }}
  {{- if or .pool.modelVolume.claimName .pool.modelVolume.image }}
  - {name: model, mountPath: {{ $.pool.modelVolume.path }}, readOnly: true}
  {{- end }}
  {{- with .pool.lora.volume.claimName }}
  - {name: adapters, mountPath: {{ $.pool.lora.volume.path }}, readOnly: true}
  {{- end }}
  {{- with .root.Values.tls.existingSecret }}
  - {name: tls, mountPath: /etc/proa/tls, readOnly: true}
  {{- end }}
  {{- with .pool.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* The volumes of those containers: (dict "root" $ "name" $name "pool" $pool) */ -}}
{{- define "proa.engine.volumes" -}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ include "proa.engine.shmSize" .pool }}}}
- {name: tmp, emptyDir: {}}
- {name: run, emptyDir: {}}
{{- if .pool.huggingFace.cacheClaim }}
- {name: cache, persistentVolumeClaim: {claimName: {{ .pool.huggingFace.cacheClaim }}}}
{{- else if .pool.huggingFace.newClaim.size }}
- {name: cache, persistentVolumeClaim: {claimName: {{ include "proa.fullname" .root }}-engine-{{ .name }}-cache}}
{{- else }}
- {name: cache, emptyDir: {}}
{{- end }}
{{- if .pool.diskCache.claimName }}
- {name: kv-disk, persistentVolumeClaim: {claimName: {{ .pool.diskCache.claimName }}}}
{{- else if .pool.diskCache.sizeGb }}
- {name: kv-disk, emptyDir: {sizeLimit: {{ include "proa.engine.diskVolumeGb" .pool }}Gi}}
{{- end }}
{{- with .pool.compileCache.claimName }}
- {name: compile-cache, persistentVolumeClaim: {claimName: {{ . }}}}
{{- end }}
{{- with .pool.modelVolume.claimName }}
- {name: model, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- with .pool.modelVolume.image }}
- {name: model, image: {reference: {{ . | quote }}}}
{{- end }}
{{- with .pool.lora.volume.claimName }}
- {name: adapters, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- with .root.Values.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ . }}}}
{{- end }}
{{- with .pool.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* CPU, memory and disk of a container by default: a GPU engine holds libraries and staging buffers for each rank, and
weights only while they are loaded. Context: the pool */ -}}
{{- define "proa.engine.defaultResources" -}}
{{- $ranks := int (include "proa.engine.containerRanks" .) -}}
{{- $onGpus := ne .gpu.allocation "none" -}}
requests:
{{- if $onGpus }}
  cpu: {{ mul 2 $ranks | quote }}
  memory: {{ add (mul 8 $ranks) (include "proa.engine.hostCacheGb" . | float64 | ceil) }}Gi
{{- else }}
  cpu: 500m
  memory: 1Gi
{{- end }}
{{- with include "proa.engine.diskRequestGb" . }}
  ephemeral-storage: {{ . }}Gi
{{- end }}
limits: {{ ternary (dict) (dict "memory" "4Gi") $onGpus | toJson }}
{{- end -}}

{{- /* CPU and memory of a container, and the GPUs of the pod's ranks: each rank sees all of them and uses its own. A request that is
not set is at most the limit. Context: the pool */ -}}
{{- define "proa.engine.resources" -}}
{{- $defaults := include "proa.engine.defaultResources" . | fromYaml -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $name, $_ := $limits -}}
{{- if get $limits $name }}{{ $_ := unset $defaults.requests $name }}{{ end -}}
{{- end -}}
{{- $resources := include "proa.withoutNulls" (mergeOverwrite $defaults (deepCopy .resources)) | fromYaml -}}
{{- if eq .gpu.allocation "devicePlugin" -}}
{{- $_ := set $resources "limits" (merge (dict .gpu.resourceName (int (include "proa.engine.podRanks" .))) ($resources.limits | default dict)) -}}
{{- else if eq .gpu.allocation "dra" -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- /* A ResourceClaimTemplate is immutable, so its name contains a hash of its content: (dict "root" $ "name" $name "pool" $pool) */ -}}
{{- define "proa.engine.claimTemplate" -}}
{{- $what := printf "%s %s" (include "proa.engine.podRanks" .pool) .pool.gpu.deviceClassName -}}
{{- printf "%s-engine-%s-gpus-%s" (include "proa.fullname" .root) .name (sha256sum $what | trunc 8) -}}
{{- end -}}

{{- /* Whether the pool's model or adapters are downloaded; empty if not. Context: the pool */ -}}
{{- define "proa.engine.downloads" -}}
{{- $remote := `^([A-Za-z0-9][^:]*(/[^:/]+:[A-Za-z0-9_.-]+)?|(s3a?|gs|az|abfss?)://.+)$` -}}
{{- if and (ne .model "builtin") (regexMatch $remote .model) }}yes{{ end -}}
{{- range ternary .lora.modules list (.lora.enabled | default false) -}}
{{- if regexMatch $remote .path }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{- /* The model name in the API. Context: the pool */ -}}
{{- define "proa.engine.modelName" -}}
{{- .servedModelName | default (ternary "proa-builtin" .model (eq .model "builtin")) -}}
{{- end -}}

{{- /* The models of all pools: model name in the API -> model */ -}}
{{- define "proa.models" -}}
{{- $models := dict -}}
{{- range $overrides := .Values.engines | default (dict "builtin" dict) -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.enginePool) (deepCopy $overrides) -}}
{{- $_ := set $models (include "proa.engine.modelName" $pool) $pool.model -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}

{{- /* Arguments of an engine with adapters. Context: the pool */ -}}
{{- define "proa.engine.loraArguments" -}}
- --enable-lora
- --max-loras={{ .lora.maxLoras }}
- --max-lora-rank={{ .lora.maxLoraRank }}
{{- with .lora.maxCpuLoras }}
- --max-cpu-loras={{ . }}
{{- end }}
{{- range .lora.modules }}
- {{ printf "--lora-modules=%s=%s" .name .path | quote }}
{{- end }}
{{- end -}}

{{- /* Arguments of an engine for images. Context: the pool */ -}}
{{- define "proa.engine.imageArguments" -}}
- --mm-processor-cache-gb={{ .images.processorCacheGb }}
{{- with .images.encoderCacheSize }}
- --encoder-cache-size={{ int . }}
{{- end }}
{{- if .images.languageModelOnly }}
- --language-model-only
{{- end }}
{{- end -}}

{{- /* Arguments of the gateway: the adapters of all pools */ -}}
{{- define "proa.gateway.loraArguments" -}}
{{- $arguments := list -}}
{{- range $overrides := .Values.engines | default (dict "builtin" dict) -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.enginePool) (deepCopy $overrides) -}}
{{- range ternary $pool.lora.modules list ($pool.lora.enabled | default false) -}}
{{- $module := dict "name" .name "path" .path "base_model_name" (include "proa.engine.modelName" $pool) -}}
{{- $arguments = append $arguments (printf "--lora-modules=%s" (toJson $module)) -}}
{{- end -}}
{{- end -}}
{{- range $arguments | uniq }}
- {{ . | squote }}
{{- end }}
{{- end -}}

{{- /* Names of the pools that KEDA scales by what gateways tell it, empty if there is none */ -}}
{{- define "proa.scaler.pools" -}}
{{- range $name, $overrides := .Values.engines | default (dict "builtin" dict) -}}
{{- $keda := (mergeOverwrite (deepCopy $.Values.enginePool) (deepCopy $overrides)).keda -}}
{{- if and $keda.enabled (eq $keda.trigger "gateway") }} {{ $name }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* Address of the gateways' scaler */ -}}
{{- define "proa.scaler.address" -}}
{{ include "proa.fullname" . }}-gateway-scaler.{{ .Release.Namespace }}.svc:{{ .Values.gateway.scalerPort }}
{{- end -}}

{{- /* PromQL: the release's queued, waiting and running requests for a pool's model, without those of prompts that other pools
compute; of a pool of role prefill those waiting and running there: (dict "root" $ "name" $name "pool" $pool). The engines' own
series have engine="0"; gateways repeat them with the engine's address. */ -}}
{{- define "proa.engine.demand" -}}
{{- $model := include "proa.engine.modelName" .pool | quote -}}
{{- $release := printf "namespace=%q,app_kubernetes_io_instance=%q" .root.Release.Namespace .root.Release.Name -}}
{{- $isPrefill := eq .pool.role "prefill" -}}
{{- $pods := ternary (printf "proa_pool=%q" .name) `proa_role!="prefill"` $isPrefill -}}
{{- $terms := ternary list (list (printf "sum(proa_gateway_queue_depth{model=%s,%s} or vector(0))" $model $release)) $isPrefill -}}
{{- range $gauge := list "vllm:num_requests_waiting" "vllm:num_requests_running" -}}
{{- $terms = append $terms (printf "sum(%s{model_name=%s,engine=\"0\",%s,%s} or vector(0))" $gauge $model $pods $release) -}}
{{- end -}}
{{- join " + " $terms -}}
{{- end -}}

{{- /* What conversations claim, in KV caches of engines: the share that they claim of all, times the number of engines */ -}}
{{- define "proa.engine.sessionDemand" -}}
{{- $model := include "proa.engine.modelName" .pool | quote -}}
{{- $release := printf "namespace=%q,app_kubernetes_io_instance=%q" .root.Release.Namespace .root.Release.Name -}}
{{- $engines := printf "vllm:num_requests_running{model_name=%s,engine=\"0\",proa_role!=\"prefill\",%s}" $model $release -}}
{{- printf "(sum(proa_gateway_session_demand{model_name=%s,%s}) or vector(0)) * (count(%s) or vector(0))" $model $release $engines -}}
{{- end -}}
