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
{{- if and $pool.modelVolume.claimName (not (hasPrefix $pool.modelVolume.path $pool.model)) -}}
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
