{{- /* Reject values without one that templates need, as --reuse-values leaves them after an upgrade of the chart */ -}}
{{- define "proa.validateValues" -}}
{{- range $path := include "proa.requiredValues" . | trim | splitList "\n" -}}
{{- $node := $.Values -}}
{{- range splitList "." $path -}}
{{- if not (hasKey $node .) -}}
{{- fail (printf "the value %s is missing: it was set to null, or --reuse-values kept the values of a chart version without it; use helm upgrade --reset-then-reuse-values." $path) -}}
{{- end -}}
{{- $node = get $node . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Reject values that cannot work in any pool */ -}}
{{- define "proa.validate" -}}
{{- $name := include "proa.fullname" . -}}
{{- if or (gt (len $name) 35) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) -}}
{{- fail (printf "object names would begin with %q: a Service name needs lower-case letters, digits and dashes, a letter first, and has room for 35 characters; set fullnameOverride." $name) -}}
{{- end -}}
{{- if not (or .Values.serviceAccount.create .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false: set serviceAccount.name to an existing ServiceAccount." -}}
{{- end -}}
{{- if lt (len (list (int .Values.engine.port) (int .Values.engine.metricsPort) (int .Values.engine.healthPort) | uniq)) 3 -}}
{{- fail "engine.port, engine.metricsPort and engine.healthPort must differ: they are ports of one pod." -}}
{{- end -}}
{{- with .Values.gateway -}}
{{- $ports := list (int .port) (int .healthPort) -}}
{{- if include "proa.scaler.pools" $ }}{{ $ports = append $ports (int .scalerPort) }}{{ end -}}
{{- if lt (len (uniq $ports)) (len $ports) -}}
{{- fail "gateway.port, gateway.healthPort and, if KEDA asks gateways, gateway.scalerPort must differ: they are ports of one pod." -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.enabled .Values.networkPolicy.enabled .Values.networkPolicy.gateway.from (has (dict "namespaceSelector" dict) .Values.networkPolicy.metrics.from) -}}
{{- fail "networkPolicy.gateway.from restricts the gateway's port, from which Prometheus also reads metrics, so networkPolicy.metrics.from cannot allow every pod: set it to Prometheus." -}}
{{- end -}}
{{- if gt (int .Values.gateway.autoscaling.minReplicas) (int .Values.gateway.autoscaling.maxReplicas) -}}
{{- fail "gateway.autoscaling.minReplicas is more than gateway.autoscaling.maxReplicas." -}}
{{- end -}}
{{- include "proa.validateRollingUpdate" (dict "at" "gateway:" "update" .Values.gateway.rollingUpdate) -}}
{{- end -}}

{{- /* Reject values of a pool that cannot work: (dict "root" $ "name" $name "pool" $pool) */ -}}
{{- define "proa.engine.validate" -}}
{{- $at := printf "engines.%s:" .name -}}
{{- $pool := .pool -}}
{{- $version := .root.Capabilities.KubeVersion.Version -}}
{{- if gt (len .name) 20 -}}
{{- fail (printf "%s a pool name may have at most 20 characters." $at) -}}
{{- end -}}
{{- $served := include "proa.engine.modelName" $pool -}}
{{- if ne $pool.model (get (include "proa.models" .root | fromYaml) $served) -}}
{{- fail (printf "%s model %s has the same served model name as another pool's model: %s; set servedModelName." $at $pool.model $served) -}}
{{- end -}}
{{- range $pool.servedModelAliases -}}
{{- if hasKey (include "proa.models" $.root | fromYaml) . -}}
{{- fail (printf "%s servedModelAliases has %s, which is the name of a model already." $at .) -}}
{{- end -}}
{{- end -}}
{{- range $flag := list "--model" "--served-model-name" "--port" "--metrics-port" "--health-port" "--drain-timeout" "--tensor-parallel-size" "--pipeline-parallel-size" "--enable-expert-parallel" "--nnodes" "--node-rank" "--master-addr" "--master-port" "--worker-socket" "--enable-lora" "--max-loras" "--max-lora-rank" "--max-cpu-loras" "--lora-modules" "--language-model-only" "--encoder-cache-size" "--mm-processor-cache-gb" "--kv-offloading-size" "--kv-offloading-path" "--kv-disk-path" "--kv-disk-size" "--kv-disk-write-mb-per-second" "--kv-transfer-address" "--kv-transfer-sources" "--role" -}}
{{- range $pool.extraArgs -}}
{{- if eq $flag (regexFind "^[^=]*" .) -}}
{{- fail (printf "%s extraArgs contains %s, which the chart sets; use the chart value instead." $at $flag) -}}
{{- end -}}
{{- end -}}
{{- $variable := printf "PROA_%s" (trimPrefix "--" $flag | replace "-" "_" | upper) -}}
{{- range $pool.env -}}
{{- if eq $variable (toString .name) -}}
{{- fail (printf "%s env contains %s, the variable of %s, which the chart sets; use the chart value instead." $at $variable $flag) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $resources := include "proa.engine.resources" $pool | fromYaml -}}
{{- with ($resources.limits | default dict).memory -}}
{{- $images := ternary 0 $pool.images.processorCacheGb ($pool.images.languageModelOnly | default false) -}}
{{- $host := include "proa.engine.hostCacheGb" $pool | float64 -}}
{{- $taken := addf (include "proa.bytes" $pool.shmSize | float64) (mulf (addf $images $host) 1073741824) -}}
{{- if gt $taken (include "proa.bytes" . | float64) -}}
{{- fail (printf "%s the memory limit %v cannot hold shmSize %s, images.processorCacheGb %v GiB and hostCache %v GiB, which count towards it, beside the weights." $at . $pool.shmSize $images $host) -}}
{{- end -}}
{{- with ($resources.requests | default dict).memory -}}
{{- if gt (include "proa.bytes" . | float64) (include "proa.bytes" $resources.limits.memory | float64) -}}
{{- fail (printf "%s the memory request %v is more than the limit %v." $at . $resources.limits.memory) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $pool.gpu.allocation "dra") (or (semverCompare "<1.34-0" $version) (not (.root.Capabilities.APIVersions.Has "resource.k8s.io/v1"))) -}}
{{- fail (printf "%s gpu.allocation dra requires resource.k8s.io/v1 (Kubernetes 1.34 or newer), the cluster has %s; use devicePlugin." $at $version) -}}
{{- end -}}
{{- range $resource, $_ := merge (dict) ($pool.resources.limits | default dict) ($pool.resources.requests | default dict) -}}
{{- if contains "gpu" $resource -}}
{{- fail (printf "%s resources contains %s; use gpu.allocation instead, which requests one GPU for each rank." $at $resource) -}}
{{- end -}}
{{- end -}}
{{- $mounted := ternary "claimName" "image" (empty $pool.modelVolume.image) -}}
{{- if and (get $pool.modelVolume $mounted) (not (hasPrefix (printf "%s/" $pool.modelVolume.path) (printf "%s/" $pool.model))) -}}
{{- fail (printf "%s modelVolume.%s is set, but model %s is not a folder under %s." $at $mounted $pool.model $pool.modelVolume.path) -}}
{{- end -}}
{{- if and $pool.modelVolume.claimName $pool.modelVolume.image -}}
{{- fail (printf "%s modelVolume.claimName and modelVolume.image would both be mounted at %s; set one of them." $at $pool.modelVolume.path) -}}
{{- end -}}
{{- if and $pool.modelVolume.image (semverCompare "<1.35-0" $version) -}}
{{- fail (printf "%s modelVolume.image requires image volumes (Kubernetes 1.35 or newer), the cluster has %s; use modelVolume.claimName." $at $version) -}}
{{- end -}}
{{- if and $pool.huggingFace.cacheClaim $pool.huggingFace.newClaim.size -}}
{{- fail (printf "%s huggingFace.cacheClaim names a claim, and huggingFace.newClaim.size creates one; set one of them." $at) -}}
{{- end -}}
{{- if and $pool.lora.modules (not $pool.lora.enabled) -}}
{{- fail (printf "%s lora.modules is set, but lora.enabled is false." $at) -}}
{{- end -}}
{{- if and $pool.lora.maxCpuLoras (lt (int $pool.lora.maxCpuLoras) (int $pool.lora.maxLoras)) -}}
{{- fail (printf "%s lora.maxCpuLoras is less than lora.maxLoras." $at) -}}
{{- end -}}
{{- if gt (len ($pool.lora.modules | default list)) (int ($pool.lora.maxCpuLoras | default (mul 4 (int $pool.lora.maxLoras)))) -}}
{{- fail (printf "%s lora.modules has more adapters than lora.maxCpuLoras, by default 4 times lora.maxLoras." $at) -}}
{{- end -}}
{{- $names := list -}}
{{- range $pool.lora.modules -}}
{{- if or (has .name $names) (hasKey (include "proa.models" $.root | fromYaml) .name) -}}
{{- fail (printf "%s lora.modules has the name %s twice, or it is the name of a model." $at .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if and $pool.autoscaling.enabled $pool.keda.enabled -}}
{{- fail (printf "%s autoscaling and keda would both set the number of pods; enable only one." $at) -}}
{{- end -}}
{{- if gt (int $pool.autoscaling.minReplicas) (int $pool.autoscaling.maxReplicas) -}}
{{- fail (printf "%s autoscaling.minReplicas is more than autoscaling.maxReplicas." $at) -}}
{{- end -}}
{{- if gt (int $pool.keda.minReplicas) (int $pool.keda.maxReplicas) -}}
{{- fail (printf "%s keda.minReplicas is more than keda.maxReplicas." $at) -}}
{{- end -}}
{{- if and $pool.keda.enabled $pool.keda.query (ne $pool.keda.trigger "prometheus") -}}
{{- fail (printf "%s keda.query is set, but keda.trigger is %s, which has no query; set keda.trigger prometheus." $at $pool.keda.trigger) -}}
{{- end -}}
{{- if and $pool.keda.enabled $pool.keda.sessionTarget (eq .root.Values.gateway.sessionAdmission.mode "off") -}}
{{- fail (printf "%s keda.sessionTarget is set, but gateway.sessionAdmission.mode is off, so conversations claim nothing." $at) -}}
{{- end -}}
{{- if and $pool.keda.enabled $pool.keda.sessionTarget (eq $pool.role "prefill") -}}
{{- fail (printf "%s keda.sessionTarget is set, but conversations have no places on engines of the role prefill." $at) -}}
{{- end -}}
{{- if and $pool.keda.enabled (eq (int $pool.keda.minReplicas) 0) (not .root.Values.gateway.scaleFromZero.timeoutSeconds) -}}
{{- fail (printf "%s keda.minReplicas 0 requires gateway.scaleFromZero.timeoutSeconds, or every request fails while no pod runs." $at) -}}
{{- end -}}
{{- include "proa.validateRollingUpdate" (dict "at" $at "update" $pool.rollingUpdate) -}}
{{- include "proa.engine.validateRanks" . -}}
{{- include "proa.engine.validateKvCache" . -}}
{{- end -}}

{{- /* (dict "at" "gateway:" "update" .Values.gateway.rollingUpdate) */ -}}
{{- define "proa.validateRollingUpdate" -}}
{{- if and (has (toString .update.maxUnavailable) (list "0" "0%")) (has (toString .update.maxSurge) (list "0" "0%")) -}}
{{- fail (printf "%s rollingUpdate cannot make progress with maxSurge and maxUnavailable 0; set one of them." .at) -}}
{{- end -}}
{{- end -}}

{{- /* Bytes of a quantity such as 4Gi, 1.5G or 4294967296; all larger units count as peta */ -}}
{{- define "proa.bytes" -}}
{{- $number := regexFind "^[0-9.]+(e[+-]?[0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := get $units (trimPrefix $number (toString .)) -}}
{{- mulf $number ($unit | default 1e15) -}}
{{- end -}}
