{{- /* What cannot work in the release as a whole, each refused in a sentence */ -}}
{{- define "proa.validate" -}}
{{- $name := include "proa.fullname" . -}}
{{- if or (gt (len $name) 35) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) -}}
{{- fail (printf "objects would be named after %q, but a Service's name has lower-case letters, digits and dashes, begins with a letter, and has room for 35 characters of it; set fullnameOverride." $name) -}}
{{- end -}}
{{- if not (or .Values.serviceAccount.create .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false, so the gateway needs the name of an account that is there, in serviceAccount.name." -}}
{{- end -}}
{{- if lt (len (list (int .Values.engine.port) (int .Values.engine.metricsPort) (int .Values.engine.healthPort) | uniq)) 3 -}}
{{- fail "engine.port, engine.metricsPort and engine.healthPort are three ports of one pod; they cannot be equal." -}}
{{- end -}}
{{- if and .Values.monitoring.enabled .Values.networkPolicy.enabled .Values.networkPolicy.gateway.from (has (dict "namespaceSelector" dict) .Values.networkPolicy.metrics.from) -}}
{{- fail "networkPolicy.gateway.from names who may open the gateway's port, where Prometheus reads metrics too, so networkPolicy.metrics.from cannot be every pod; name Prometheus there." -}}
{{- end -}}
{{- include "proa.validateRollingUpdate" (dict "at" "gateway:" "update" .Values.gateway.rollingUpdate) -}}
{{- end -}}

{{- /* Combinations that cannot work, each refused in a sentence: (dict "root" $ "name" $name "pool" $pool) */ -}}
{{- define "proa.engine.validate" -}}
{{- $at := printf "engines.%s:" .name -}}
{{- $pool := .pool -}}
{{- $tp := int $pool.tensorParallelSize -}}
{{- $parallelSidecars := and (eq $pool.tensorParallel.mode "sidecar") (gt $tp 1) -}}
{{- $version := .root.Capabilities.KubeVersion.Version -}}
{{- if gt (len .name) 20 -}}
{{- fail (printf "%s the name of a pool may have at most 20 characters." $at) -}}
{{- end -}}
{{- $served := include "proa.engine.modelName" $pool -}}
{{- if ne $pool.model (get (include "proa.models" .root | fromYaml) $served) -}}
{{- fail (printf "%s another pool serves a model other than %s under the same name, %s; set servedModelName." $at $pool.model $served) -}}
{{- end -}}
{{- range $flag := list "--model" "--served-model-name" "--port" "--metrics-port" "--health-port" "--drain-timeout" "--tensor-parallel-size" "--worker-socket" -}}
{{- range $pool.extraArgs -}}
{{- if eq $flag (regexFind "^[^=]*" .) -}}
{{- fail (printf "%s extraArgs say %s, which the chart sets itself, and builds other objects on; use the value for it." $at $flag) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with ($pool.resources.limits | default dict).memory -}}
{{- if gt (include "proa.bytes" $pool.shmSize | float64) (include "proa.bytes" . | float64) -}}
{{- fail (printf "%s shmSize %s is more than the memory limit %v, which counts what lies in it." $at $pool.shmSize .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $pool.model "builtin") (gt $tp 2) -}}
{{- fail (printf "%s tensorParallelSize %d does not divide the built-in model's 6 heads and 2048 tokens; it runs on 1 or 2 ranks." $at $tp) -}}
{{- end -}}
{{- if and $parallelSidecars (eq $pool.gpu.allocation "devicePlugin") -}}
{{- fail (printf "%s tensorParallel.mode sidecar cannot share GPUs that a device plugin gives to one container; use mode process, or gpu.allocation dra." $at) -}}
{{- end -}}
{{- if and (eq $pool.gpu.allocation "dra") (or (semverCompare "<1.34-0" $version) (not (.root.Capabilities.APIVersions.Has "resource.k8s.io/v1"))) -}}
{{- fail (printf "%s gpu.allocation dra needs resource.k8s.io/v1, that is Kubernetes 1.34 or newer, and this is %s; use devicePlugin." $at $version) -}}
{{- end -}}
{{- range $resource, $_ := merge (dict) ($pool.resources.limits | default dict) ($pool.resources.requests | default dict) -}}
{{- if contains "gpu" $resource -}}
{{- fail (printf "%s resources name %s; say gpu.allocation instead, which gives each rank a GPU." $at $resource) -}}
{{- end -}}
{{- end -}}
{{- if and $pool.modelVolume.claimName (not (hasPrefix (printf "%s/" $pool.modelVolume.path) (printf "%s/" $pool.model))) -}}
{{- fail (printf "%s modelVolume names a claim, but model %s is no folder under %s." $at $pool.model $pool.modelVolume.path) -}}
{{- end -}}
{{- if and $pool.autoscaling.enabled $pool.keda.enabled -}}
{{- fail (printf "%s autoscaling and keda would both set the number of pods; enable one." $at) -}}
{{- end -}}
{{- if gt (int $pool.autoscaling.minReplicas) (int $pool.autoscaling.maxReplicas) -}}
{{- fail (printf "%s autoscaling.minReplicas is more than autoscaling.maxReplicas." $at) -}}
{{- end -}}
{{- if gt (int $pool.keda.minReplicas) (int $pool.keda.maxReplicas) -}}
{{- fail (printf "%s keda.minReplicas is more than keda.maxReplicas." $at) -}}
{{- end -}}
{{- if and $pool.keda.enabled (eq (int $pool.keda.minReplicas) 0) (not .root.Values.gateway.scaleFromZero.timeoutSeconds) -}}
{{- fail (printf "%s keda.minReplicas 0 needs gateway.scaleFromZero.timeoutSeconds, or every request would fail while no pod runs." $at) -}}
{{- end -}}
{{- include "proa.validateRollingUpdate" (dict "at" $at "update" $pool.rollingUpdate) -}}
{{- end -}}

{{- /* (dict "at" "gateway:" "update" .Values.gateway.rollingUpdate) */ -}}
{{- define "proa.validateRollingUpdate" -}}
{{- if and (has (toString .update.maxUnavailable) (list "0" "0%")) (has (toString .update.maxSurge) (list "0" "0%")) -}}
{{- fail (printf "%s rollingUpdate can neither take a pod away nor add one; set maxSurge or maxUnavailable." .at) -}}
{{- end -}}
{{- end -}}

{{- /* Bytes of a quantity such as 4Gi, 1.5G or 4294967296; larger units than these are all taken for peta */ -}}
{{- define "proa.bytes" -}}
{{- $number := regexFind "^[0-9.]+(e[+-]?[0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := get $units (trimPrefix $number (toString .)) -}}
{{- mulf $number ($unit | default 1e15) -}}
{{- end -}}
