{{- /* The tiers of the KV cache behind the device, and the exchange of blocks between engines. Context: the pool */ -}}

{{- /* GiB of a container's ranks, of an amount for all ranks: (dict "pool" $pool "gb" $gb) */ -}}
{{- define "proa.engine.shareGb" -}}
{{- divf (mulf .gb (include "proa.engine.containerRanks" .pool)) (include "proa.engine.ranks" .pool) -}}
{{- end -}}

{{- define "proa.engine.hostCacheGb" -}}
{{- include "proa.engine.shareGb" (dict "pool" . "gb" .hostCache.sizeGb) -}}
{{- end -}}

{{- /* GiB that the disk cache of a container takes of the node, with room for segments that are written; empty if it takes none */ -}}
{{- define "proa.engine.diskRequestGb" -}}
{{- if and .diskCache.sizeGb (not .diskCache.claimName) -}}
{{- addf (include "proa.engine.shareGb" (dict "pool" . "gb" .diskCache.sizeGb)) 1 | ceil -}}
{{- end -}}
{{- end -}}

{{- /* GiB of the volume of all containers. A pod with a fuller one is evicted */ -}}
{{- define "proa.engine.diskVolumeGb" -}}
{{- addf .diskCache.sizeGb (include "proa.engine.ranks" .) | ceil -}}
{{- end -}}

{{- /* The size limit of /dev/shm */ -}}
{{- define "proa.engine.shmSize" -}}
{{- if .hostCache.survivesRestart -}}
{{- divf (addf (include "proa.bytes" .shmSize) (mulf .hostCache.sizeGb 1073741824)) 1048576 | ceil -}}Mi
{{- else -}}
{{- .shmSize -}}
{{- end -}}
{{- end -}}

{{- /* (dict "root" $ "pool" $pool) */ -}}
{{- define "proa.engine.kvArguments" -}}
{{- with .pool.hostCache.sizeGb }}
- --kv-offloading-size={{ . }}
{{- end }}
{{- if .pool.hostCache.survivesRestart }}
- --kv-offloading-path=/dev/shm/proa
{{- end }}
{{- with .pool.diskCache.sizeGb }}
- --kv-disk-path=/kv-disk
- --kv-disk-size={{ . }}
- --kv-disk-write-mb-per-second={{ $.pool.diskCache.writeMbPerSecond }}
{{- end }}
{{- if .pool.kvTransfer.enabled }}
- --kv-transfer-address=:{{ .root.Values.engine.kvPort }}
- --kv-transfer-sources={{ include "proa.fullname" .root }}-engine.{{ .root.Release.Namespace }}
{{- end }}
{{- if ne .pool.role "both" }}
- --role={{ .pool.role }}
{{- end }}
{{- end -}}

{{- /* Ports of the movers of ranks: (dict "root" $ "ranks" list) */ -}}
{{- define "proa.engine.kvPorts" -}}
{{- range .ranks }}
- {name: kv-{{ . }}, containerPort: {{ add $.root.Values.engine.kvPort . }}}
{{- end }}
{{- end -}}

{{- /* The model's name as the value of a label, which allows no slash: with a hash, because it is shortened */ -}}
{{- define "proa.engine.modelLabel" -}}
{{- $name := include "proa.engine.modelName" . -}}
{{- $readable := regexReplaceAll "[^A-Za-z0-9]+" $name "-" | trunc 50 | trimAll "-" -}}
{{- printf "%s-%s" $readable (sha256sum $name | trunc 8) | trimPrefix "-" -}}
{{- end -}}

{{- /* What decides, as far as values show it, whether blocks of one pool can be used by another one */ -}}
{{- define "proa.engine.blockKind" -}}
{{- $flags := list "--revision" "--load-format" "--seed" "--dtype" "--quantization" "--kv-cache-dtype" "--block-size" "--batch-invariant" "--speculative-config" -}}
{{- $found := dict "tensorParallelSize" (int .tensorParallelSize) "onGpus" (ne .gpu.allocation "none") -}}
{{- $last := "" -}}
{{- range .extraArgs -}}
{{- if hasPrefix "--" . -}}
{{- $last = regexFind "^[^=]*" . -}}
{{- if has $last $flags }}{{ $_ := set $found $last (trimPrefix $last . | trimPrefix "=") }}{{ end -}}
{{- else if has $last $flags -}}
{{- $_ := set $found $last . -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* Reject values of the tiers that cannot work: (dict "root" $ "name" $name "pool" $pool) */ -}}
{{- define "proa.engine.validateKvCache" -}}
{{- $at := printf "engines.%s:" .name -}}
{{- $pool := .pool -}}
{{- if not $pool.hostCache.sizeGb -}}
{{- range $name, $isSet := dict "hostCache.survivesRestart" $pool.hostCache.survivesRestart "diskCache.sizeGb" $pool.diskCache.sizeGb "kvTransfer.enabled" $pool.kvTransfer.enabled -}}
{{- if $isSet -}}
{{- fail (printf "%s %s is set, but hostCache.sizeGb is 0: blocks go through host memory." $at $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $pool.diskCache.claimName (not $pool.diskCache.sizeGb) -}}
{{- fail (printf "%s diskCache.claimName is set, but diskCache.sizeGb is 0." $at) -}}
{{- end -}}
{{- if $pool.kvTransfer.enabled -}}
{{- $first := int .root.Values.engine.kvPort -}}
{{- $last := sub (add $first (int (include "proa.engine.ranks" $pool))) 1 -}}
{{- range $port := list .root.Values.engine.port .root.Values.engine.metricsPort .root.Values.engine.healthPort -}}
{{- if and (ge (int $port) $first) (le (int64 $port) $last) -}}
{{- fail (printf "%s engine.kvPort %d and the ports of further ranks up to %d contain %d, another port of the pod." $at $first $last (int $port)) -}}
{{- end -}}
{{- end -}}
{{- else if ne $pool.role "both" -}}
{{- fail (printf "%s role %s requires kvTransfer.enabled: engines of role decode fetch the blocks of prompts from engines of role prefill." $at $pool.role) -}}
{{- end -}}
{{- if ne $pool.role "both" -}}
{{- include "proa.engine.validatePartners" . -}}
{{- end -}}
{{- if and (eq $pool.role "prefill") $pool.keda.enabled (not $pool.keda.minReplicas) -}}
{{- fail (printf "%s keda.minReplicas 0 cannot work with role prefill: no request waits for such a pod, so it would never start; use at least 1." $at) -}}
{{- end -}}
{{- $disk := include "proa.engine.diskRequestGb" $pool -}}
{{- with get ($pool.resources.limits | default dict) "ephemeral-storage" -}}
{{- if gt (mulf ($disk | default "0") 1073741824) (include "proa.bytes" . | float64) -}}
{{- fail (printf "%s the limit %v of ephemeral-storage cannot hold diskCache, which takes up to %s GiB in a container." $at . $disk) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Reject a pool of role prefill or decode whose blocks no pool of the other kind can use, if the model has one or needs one.
Arguments as above */ -}}
{{- define "proa.engine.validatePartners" -}}
{{- $model := include "proa.engine.modelName" .pool -}}
{{- $roles := ternary (list "decode" "both") (list "prefill") (eq .pool.role "prefill") -}}
{{- $others := list -}}
{{- $partners := list -}}
{{- range $name, $overrides := .root.Values.engines | default (dict "builtin" dict) -}}
{{- $other := mergeOverwrite (deepCopy $.root.Values.enginePool) (deepCopy $overrides) -}}
{{- if and (eq $model (include "proa.engine.modelName" $other)) (has $other.role $roles) -}}
{{- $others = append $others $name -}}
{{- if and $other.kvTransfer.enabled (eq (include "proa.engine.blockKind" $.pool) (include "proa.engine.blockKind" $other)) -}}
{{- $partners = append $partners $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .pool.role "prefill") (not $others) -}}
{{- fail (printf "engines.%s: all pools of model %s have role prefill; add one of role decode, which generates the outputs." .name $model) -}}
{{- end -}}
{{- if and $others (not $partners) -}}
{{- fail (printf "engines.%s: role %s, but no blocks can be exchanged with %s: the pools need kvTransfer.enabled, and equal tensorParallelSize, kind of device (gpu.allocation) and model flags in extraArgs, here %s." .name .pool.role (join ", " $others) (include "proa.engine.blockKind" .pool)) -}}
{{- end -}}
{{- end -}}

{{- /* Whether a pool of the release exchanges blocks; empty if none does. Context: the root */ -}}
{{- define "proa.exchangesBlocks" -}}
{{- range $overrides := .Values.engines | default (dict "builtin" dict) -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.enginePool) (deepCopy $overrides) -}}
{{- if $pool.kvTransfer.enabled }}yes{{ end -}}
{{- end -}}
{{- end -}}
