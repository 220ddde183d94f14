{{- /* The ranks of an engine, and the pods and containers that they are in. */ -}}

{{- /* The ranks of an engine, of one of its pods, and of one container that runs ranks. Context: the pool */ -}}
{{- define "proa.engine.ranks" -}}
{{- mul (int .tensorParallelSize) (int .pipelineParallelSize) -}}
{{- end -}}
{{- define "proa.engine.podRanks" -}}
{{- div (int (include "proa.engine.ranks" .)) (int .nodes) -}}
{{- end -}}
{{- define "proa.engine.containerRanks" -}}
{{- if eq .tensorParallel.mode "process" }}{{ include "proa.engine.podRanks" . }}{{ else }}1{{ end -}}
{{- end -}}

{{- /* Reject numbers of ranks and nodes that cannot work: (dict "root" $ "name" $name "pool" $pool) */ -}}
{{- define "proa.engine.validateRanks" -}}
{{- $at := printf "engines.%s:" .name -}}
{{- $pool := .pool -}}
{{- $ranks := int (include "proa.engine.ranks" $pool) -}}
{{- $parallelSidecars := and (eq $pool.tensorParallel.mode "sidecar") (gt $ranks 1) -}}
{{- if and $parallelSidecars (eq $pool.gpu.allocation "devicePlugin") -}}
{{- fail (printf "%s tensorParallel.mode sidecar cannot share GPUs that a device plugin allocates to one container; use mode process, or gpu.allocation dra." $at) -}}
{{- end -}}
{{- if or (gt (int $pool.nodes) 1) (gt (int $pool.pipelineParallelSize) 1) -}}
{{- range $name, $isSet := dict "hostCache.survivesRestart" $pool.hostCache.survivesRestart "diskCache.sizeGb" $pool.diskCache.sizeGb "kvTransfer.enabled" $pool.kvTransfer.enabled -}}
{{- if $isSet -}}
{{- fail (printf "%s %s cannot work with nodes %d and pipelineParallelSize %d: engines with several of either keep KV cache blocks on their devices and in hostCache only." $at $name (int $pool.nodes) (int $pool.pipelineParallelSize)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (int $pool.nodes) 1 -}}
{{- include "proa.engine.validateNodes" . -}}
{{- end -}}
{{- end -}}

{{- /* Reject values of a pool with several nodes that cannot work. Arguments as above */ -}}
{{- define "proa.engine.validateNodes" -}}
{{- $at := printf "engines.%s:" .name -}}
{{- $pool := .pool -}}
{{- $nodes := int $pool.nodes -}}
{{- $ranks := int (include "proa.engine.ranks" $pool) -}}
{{- if mod $ranks $nodes -}}
{{- fail (printf "%s nodes %d does not divide the engine's ranks, tensorParallelSize %d times pipelineParallelSize %d." $at $nodes (int $pool.tensorParallelSize) (int $pool.pipelineParallelSize)) -}}
{{- end -}}
{{- if not (.root.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") -}}
{{- fail (printf "%s nodes %d requires leaderworkerset.x-k8s.io/v1, which the cluster does not have; install the LeaderWorkerSet controller (helm template needs --api-versions=leaderworkerset.x-k8s.io/v1)." $at $nodes) -}}
{{- end -}}
{{- if eq $pool.tensorParallel.mode "sidecar" -}}
{{- fail (printf "%s tensorParallel.mode sidecar cannot work with nodes %d: each pod starts its own ranks; use mode process." $at $nodes) -}}
{{- end -}}
{{- /* StatefulSets of the controller have the name and a group's number; a label of their pods adds a hash of 10 characters */ -}}
{{- $workload := printf "%s-engine-%s" (include "proa.fullname" .root) .name -}}
{{- if gt (len $workload) 48 -}}
{{- fail (printf "%s the LeaderWorkerSet would be named %s, which is longer than 48 characters; shorten the pool's name or set fullnameOverride." $at $workload) -}}
{{- end -}}
{{- range $other, $_ := .root.Values.engines -}}
{{- if regexMatch (printf "^%s-[0-9]+$" $.name) $other -}}
{{- fail (printf "%s pool %s has the name of a group of this pool; rename one of them." $at $other) -}}
{{- end -}}
{{- end -}}
{{- with .root.Values.engine -}}
{{- if has (int .masterPort) (list (int .port) (int .metricsPort) (int .healthPort)) -}}
{{- fail (printf "%s engine.masterPort %d is another port of the pod." $at (int .masterPort)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
