"""The flags of `vllm serve`, version 0.33.0, and some of earlier versions. docs/from-vllm.md is made from it."""

from proa_cli.vllm_flags import Kind, Row, rows

_PARTS = "the engine's parts are chosen by model and device, and no class of the user's is loaded"
_KERNELS = "kernels are chosen by model and device"
_REPLICAS = (
    "run an engine for each replica behind one gateway: `proa-gateway serve --engine HOST:PORT`, repeated, or the "
    "chart's `enginePool.replicas`"
)
_HTTPS = "let a proxy in front of the gateway end HTTPS, in a cluster the chart's `gateway.ingress`"
_EXPERTS = "the experts of a mixture stay on the ranks that loaded them, and ranks exchange by all-reduces"
_OFFLOAD = "weights stay on the device; `--tensor-parallel-size` divides them among several"
_NO_TEXTS = "prompts and answers are not logged"
_STATES = "the recurrent states of a model have the types, sizes and kernels that the engine chooses"
_IMAGES = "images are read as the model's own processor reads them"
_IMAGE_CACHE = "`--mm-processor-cache-gb` on the engine and `--image-cache-bytes` on the gateway set the caches' sizes"
_SLEEP = "what sleep frees is chosen by the request `/sleep`, for which `--enable-dev-endpoints` is needed"
_LOAD = "threads always read weights ahead, in pieces, while others are copied to the device"
_RATE = "which figures the metrics have is fixed"
_SPECULATIVE = '`--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'`'
_CUDA_GRAPHS = "CUDA graphs are captured for sizes up to `--max-num-seqs`; `--enforce-eager` captures none"
_PLUGINS = "no code of users is loaded"
_NODES = "`--nnodes`, `--node-rank`, `--master-addr` and `--master-port` divide one engine over several machines"

_SAME = (
    rows(
        Kind.SAME,
        "as in vLLM",
        "--allow-credentials --allowed-headers --allowed-methods --allowed-origins --async-scheduling --chat-template "
        "--chat-template-content-format --config --disable-custom-all-reduce --dtype --enable-force-include-usage "
        "--enable-lora --enable-per-request-metrics --enable-prefix-caching --enable-prompt-embeds "
        "--enable-tokenizer-info-endpoint "
        "--enforce-eager --host --kv-cache-memory-bytes --kv-offloading-size --language-model-only --lora-modules "
        "--master-addr --master-port --max-logprobs --nnodes --node-rank --num-gpu-blocks-override "
        "--pipeline-parallel-size --port --return-tokens-as-token-ids --revision --root-path --scheduling-policy "
        "--skip-tokenizer-init --stream-interval --tensor-parallel-size --tokenizer --trust-request-chat-template",
    )
    | rows(Kind.SAME, "or the variable `PROA_API_KEY`; `--api-keys` has a file of keys with limits", "--api-key")
    | rows(Kind.SAME, "the metrics stay, unlike in vLLM; `--metrics-port 0` serves none", "--disable-log-stats")
    | rows(Kind.SAME, "`debug`, `info`, `warning` or `error`, of engine and gateway", "--log-level")
    | rows(Kind.SAME, "without it no URL is fetched", "--allowed-media-domains")
    | rows(Kind.SAME, "default: 16", "--block-size")
    | rows(Kind.SAME, "1 or `--tensor-parallel-size`, for latent attention", "--decode-context-parallel-size")
    | rows(Kind.SAME, "over the tensor-parallel ranks", "--enable-expert-parallel")
    | rows(Kind.SAME, "default: 0.9", "--gpu-memory-utilization")
    | rows(
        Kind.SAME,
        "`auto`, which follows the checkpoint, the types of activations, `fp8` and `fp8_e4m3`",
        "--kv-cache-dtype",
    )
    | rows(Kind.SAME, "images only; default: 16", "--limit-mm-per-prompt")
    | rows(
        Kind.SAME,
        "`auto`, which reads safetensors as `fastsafetensors` and `runai_streamer` do, ahead and in several threads, "
        "and `dummy`",
        "--load-format",
    )
    | rows(
        Kind.SAME,
        "objects are changed field by field, as by a JSON merge patch; where `config.json` has `rope_parameters`, "
        "those take the place of `rope_scaling` and `rope_theta`",
        "--hf-overrides",
    )
    | rows(
        Kind.SAME,
        "`temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`, not `max_new_tokens`",
        "--generation-config --override-generation-config",
    )
    | rows(
        Kind.SAME,
        "with units and `auto` as in vLLM: the default is the model's context length, and a start for which there is "
        "not enough memory names the longest that fits",
        "--max-model-len",
    )
    | rows(Kind.SAME, "also for downloads from object stores", "--download-dir")
    | rows(Kind.SAME, "default: 4 times `--max-loras`", "--max-cpu-loras")
    | rows(Kind.SAME, "at most 256", "--max-lora-rank")
    | rows(Kind.SAME, "default: 4", "--max-loras")
    | rows(Kind.SAME, "default: 8192 on every device", "--max-num-batched-tokens")
    | rows(Kind.SAME, "default: 256; at most 65,000", "--max-num-seqs")
    | rows(Kind.SAME, "default: 1", "--mm-processor-cache-gb")
    | rows(
        Kind.SAME,
        "`task`, `pooling_type`, `use_activation`, `enable_chunked_processing` and `max_embed_len`",
        "--pooler-config",
    )
    | rows(
        Kind.SAME,
        "`auto-round`, `awq`, `compressed-tensors`, `fp8`, `gptq`, `modelopt` and `mxfp4`; that of a quantized "
        "checkpoint is found without it; unquantized ones are quantized by `fp8`, with a scale for each output where "
        "vLLM has one for the tensor, and by `fp8_per_block`, not by `fp8_per_tensor`",
        "--quantization",
    )
    | rows(Kind.SAME, "`auto`, `generate` and `pooling`", "--runner")
    | rows(Kind.SAME, "of dummy weights; requests have `seed`", "--seed")
    | rows(Kind.SAME, "the first name is that of responses and metrics, as in vLLM", "--served-model-name")
    | rows(Kind.SAME, "the method `ngram`, as JSON", "--speculative-config")
    | rows(
        Kind.SAME,
        "formats have the names that they have in vLLM, except `harmony` for `openai`; a wrong name lists all; without "
        "it the format is found by the chat template",
        "--tool-call-parser",
    )
    | rows(
        Kind.SAME,
        "names are those of `--tool-call-parser`, not vLLM's such as `qwen3` and `deepseek_r1`; without it the format "
        "is found by the chat template",
        "--reasoning-parser",
    )
)

_ACCEPTED = (
    rows(Kind.ACCEPTED, "long prompts are always computed in chunks", "--enable-chunked-prefill", ["true"])
    | rows(
        Kind.ACCEPTED,
        "calls are read from every answer to a request with tools, if the model's format of calls is known",
        "--enable-auto-tool-choice",
        ["true"],
    )
    | rows(
        Kind.ACCEPTED,
        "no code of a model's folder is ever run; a model that needs it is refused, unless a plugin adds its "
        "architecture (docs/plugins.md)",
        "--trust-remote-code",
        None,
    )
    | rows(Kind.ACCEPTED, "no code of a model's folder is ever run", "--code-revision", None)
    | rows(
        Kind.ACCEPTED,
        "with `tool_choice` `none` the model gets to know no tools",
        "--exclude-tools-when-tool-choice-none",
        ["true"],
    )
    | rows(Kind.ACCEPTED, "every response has `X-Request-Id`", "--enable-request-id-headers", ["true"])
    | rows(Kind.ACCEPTED, "`usage` always has them", "--enable-prompt-tokens-details", ["true"])
    | rows(Kind.ACCEPTED, "`/load` always has the number of requests", "--enable-server-load-tracking", ["true"])
    | rows(
        Kind.ACCEPTED,
        "reasoning is always apart from the answer, if the model's format is known",
        "--enable-reasoning",
        ["true"],
    )
    | rows(Kind.ACCEPTED, "ranks are processes that the engine starts", "--distributed-executor-backend", ["mp"])
    | rows(
        Kind.ACCEPTED,
        "log probabilities are the model's, before penalties and temperature",
        "--logprobs-mode",
        ["raw_logprobs"],
    )
    | rows(Kind.ACCEPTED, "configurations are read in the format of Hugging Face", "--config-format", ["auto", "hf"])
    | rows(Kind.ACCEPTED, "tokenizers are read from `tokenizer.json`", "--tokenizer-mode", ["auto", "hf"])
    | rows(
        Kind.ACCEPTED,
        "models without an implementation of the engine's own run through `transformers`",
        "--model-impl",
        ["auto"],
    )
    | rows(
        Kind.ACCEPTED,
        "what a model is for is read from its files; `--runner pooling` makes embeddings of a language model",
        "--convert --task",
        ["auto"],
    )
    | rows(Kind.ACCEPTED, _LOAD, "--safetensors-load-strategy", ["lazy", "eager", "prefetch"])
    | rows(
        Kind.ACCEPTED,
        _LOAD,
        "--safetensors-prefetch-num-threads --safetensors-prefetch-block-size --max-parallel-loading-workers",
        None,
    )
    | rows(Kind.ACCEPTED, "there is one backend, Proa's own", "--kv-offloading-backend", ["native"])
    | rows(Kind.ACCEPTED, "answers have the role `assistant`", "--response-role", ["assistant"])
    | rows(Kind.ACCEPTED, "without `--access-log` requests are not logged", "--disable-uvicorn-access-log", ["true"])
    | rows(Kind.ACCEPTED, "without `--access-log` requests are not logged", "--disable-log-requests", ["true"])
    | rows(
        Kind.ACCEPTED,
        "the access log never has `/health`, `/ready`, `/ping` and `/metrics`",
        "--disable-access-log-for-endpoints",
        ["/health", "/ping", "/metrics", "/health,/metrics", "/health,/ping", "/health,/metrics,/ping"],
    )
    | rows(Kind.ACCEPTED, _NO_TEXTS, "--max-log-len", None)
    | rows(Kind.ACCEPTED, _NO_TEXTS, "--enable-log-deltas", None)
    | rows(
        Kind.ACCEPTED,
        "there are no levels: models are not compiled; `--enforce-eager` captures no CUDA graphs",
        "--optimization-level",
        ["1", "2", "3"],
    )
    | rows(
        Kind.ACCEPTED, "traces always have the spans of the engine and its workers", "--collect-detailed-traces", None
    )
    | rows(Kind.ACCEPTED, "late interaction is scored in one way", "--enable-flash-late-interaction", ["true"])
    | rows(Kind.ACCEPTED, "there is one mode", "--performance-mode", ["balanced"])
    | rows(Kind.ACCEPTED, "attention has no cascades", "--disable-cascade-attn", ["true"])
    | rows(
        Kind.ACCEPTED,
        "a request starts when there are blocks for its whole prompt",
        "--scheduler-reserve-full-isl",
        ["true"],
    )
    | rows(
        Kind.ACCEPTED,
        "each rank has the whole encoder, and the images of a step are divided among the ranks",
        "--mm-encoder-tp-mode",
        ["data"],
    )
    | rows(
        Kind.ACCEPTED,
        "the scripts of `/docs` and `/redoc` come from the gateway",
        "--enable-offline-docs",
        ["true"],
    )
    | rows(Kind.ACCEPTED, "loading is logged without a progress bar", "--use-tqdm-on-load", None)
    | rows(Kind.ACCEPTED, "only safetensors files are read", "--pt-load-map-location --ignore-patterns", None)
)

_ELSEWHERE = (
    rows(Kind.ELSEWHERE, "name the model behind `proa serve`", "--model")
    | rows(
        Kind.ELSEWHERE,
        "run more gateways for the same engines, each by `proa-gateway serve`, or set the chart's `gateway.replicas`",
        "--api-server-count",
        ["1"],
    )
    | rows(Kind.ELSEWHERE, _REPLICAS, "--data-parallel-size --data-parallel-size-local", ["1"])
    | rows(
        Kind.ELSEWHERE,
        _REPLICAS,
        "--data-parallel-address --data-parallel-backend --data-parallel-external-lb --data-parallel-hybrid-lb "
        "--data-parallel-multi-port-external-lb --data-parallel-rank --data-parallel-rpc-port "
        "--data-parallel-start-rank --data-parallel-supervisor-port --dp-supervisor-probe-failure-threshold "
        "--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-sync-interval "
        "--disable-nccl-for-dp-synchronization",
    )
    | rows(
        Kind.ELSEWHERE,
        "each engine logs for itself; Prometheus adds the metrics of several",
        "--aggregate-engine-logging",
    )
    | rows(Kind.ELSEWHERE, f"{_NODES}; start each node by `proa-engine serve`", "--headless")
    | rows(
        Kind.ELSEWHERE,
        "`proa-engine serve` without a gateway is the gRPC API, see docs/grpc.md",
        "--grpc --grpc-port --tokens-only",
    )
    | rows(Kind.ELSEWHERE, "`--gpu-memory-utilization`", "--device-memory-utilization")
    | rows(Kind.ELSEWHERE, "the variable `CUDA_VISIBLE_DEVICES`", "--device-ids")
    | rows(
        Kind.ELSEWHERE,
        "start the engine by `numactl`",
        "--numa-bind --numa-bind-nodes --numa-bind-cpus",
    )
    | rows(Kind.ELSEWHERE, "the variable `HF_TOKEN`", "--hf-token")
    | rows(Kind.ELSEWHERE, "give `--tokenizer` a folder", "--tokenizer-revision")
    | rows(
        Kind.ELSEWHERE,
        "the variable `OTEL_EXPORTER_OTLP_ENDPOINT`, or others that begin with `OTEL_`",
        "--otlp-traces-endpoint",
    )
    | rows(Kind.ELSEWHERE, "`--log-level` is that of engine and gateway", "--uvicorn-log-level", ["info"])
    | rows(
        Kind.ELSEWHERE,
        "`--access-log` writes a line for each request, without its texts, see docs/logs.md",
        "--enable-log-requests",
    )
    | rows(
        Kind.ELSEWHERE,
        "`--drain-timeout`",
        "--shutdown-timeout",
    )
    | rows(
        Kind.ELSEWHERE,
        "`--max-concurrent-requests` of the gateway, by default 2048",
        "--max-num-queued-reqs",
    )
    | rows(Kind.ELSEWHERE, "`--max-queued-tokens` of the gateway, by default 4194304", "--max-num-queued-tokens")
    | rows(Kind.ELSEWHERE, "`--max-num-seqs`", "--max-num-active-seqs")
    | rows(Kind.ELSEWHERE, "`--max-num-batched-tokens`", "--max-num-scheduled-tokens")
    | rows(
        Kind.ELSEWHERE,
        _SPECULATIVE,
        "--spec-method --spec-model --spec-tokens --speculative-model --num-speculative-tokens",
    )
    | rows(Kind.ELSEWHERE, "`--pooler-config`", "--override-pooler-config")
    | rows(Kind.ELSEWHERE, "`rope_parameters` in `--hf-overrides`", "--rope-scaling --rope-theta")
    | rows(
        Kind.ELSEWHERE,
        "`--kv-transfer-address`, with `--kv-transfer-sources`, `--kv-offloading-size` and `--role`, "
        "see docs/kv-cache.md",
        "--kv-transfer-config",
    )
    | rows(
        Kind.ELSEWHERE,
        "`SubscribeKvEvents` of the engine's gRPC API, which gateways follow by themselves",
        "--kv-events-config",
    )
    | rows(
        Kind.ELSEWHERE,
        "`--enable-dev-endpoints`, for `/sleep` and `/wake_up`",
        "--enable-sleep-mode",
    )
    | rows(
        Kind.ELSEWHERE,
        "`--step-timeout` is the time, beyond what a step should take, after which it makes the engine not ready",
        "--watchdog-config",
    )
    | rows(
        Kind.ELSEWHERE,
        _HTTPS,
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh",
    )
    | rows(
        Kind.ELSEWHERE,
        "`--max-body-bytes` is the limit of a request's body",
        "--h11-max-incomplete-event-size",
    )
    | rows(
        Kind.ELSEWHERE,
        "let a proxy in front of the gateway not forward `/docs`, `/redoc` and `/openapi.json`",
        "--disable-fastapi-docs",
    )
    | rows(
        Kind.ELSEWHERE,
        "requests give `chat_template_kwargs`; other defaults need a template of your own, by `--chat-template`",
        "--default-chat-template-kwargs --reasoning-effort-map",
    )
)

_REFUSED = (
    rows(
        Kind.REFUSED,
        _PARTS,
        "--worker-cls --worker-extension-cls --scheduler-cls --additional-config --model-class-overrides",
    )
    | rows(
        Kind.REFUSED,
        _KERNELS,
        "--attention-backend --mm-encoder-attn-backend --moe-backend --linear-backend --sparse-indexer-topk-backend "
        "--gdn-prefill-backend --kda-prefill-backend --kda-decode-backend",
        ["auto"],
    )
    | rows(
        Kind.REFUSED,
        _KERNELS,
        "--attention-config --mm-encoder-attn-dtype --kernel-config --ir-op-priority --monokernel "
        "--enable-flashinfer-autotune",
    )
    | rows(Kind.REFUSED, "models are not compiled; kernels and CUDA graphs are fixed", "--compilation-config")
    | rows(
        Kind.REFUSED,
        _CUDA_GRAPHS,
        "--cudagraph-capture-sizes --max-cudagraph-capture-size --max-seq-len-to-capture",
    )
    | rows(
        Kind.REFUSED,
        _PLUGINS,
        "--logits-processors --io-processor-plugin --middleware",
    )
    | rows(
        Kind.REFUSED,
        "install a package with the entry point `proa.tool_formats`, whose name `--tool-call-parser` then knows "
        "(docs/plugins.md)",
        "--tool-parser-plugin",
    )
    | rows(
        Kind.REFUSED,
        "install a package with the entry point `proa.reasoning_formats`, whose name `--reasoning-parser` then knows "
        "(docs/plugins.md)",
        "--reasoning-parser-plugin",
    )
    | rows(Kind.REFUSED, "the gateway calls no tools", "--tool-server")
    | rows(
        Kind.REFUSED,
        "a request's `tool_choice` and its tools' `strict` say what is constrained",
        "--tool-strict-level",
        ["auto"],
    )
    | rows(
        Kind.REFUSED,
        "there is one backend for constrained outputs, llguidance",
        "--structured-outputs-config --guided-decoding-backend",
        ["auto"],
    )
    | rows(
        Kind.REFUSED,
        "the model's format says where reasoning begins and ends",
        "--reasoning-config",
    )
    | rows(
        Kind.REFUSED,
        "the effort of a request goes to the chat template as it is",
        "--anthropic-disabled-thinking-effort",
        ["auto"],
    )
    | rows(Kind.REFUSED, "there is no API of Cohere's", "--cohere-format --cohere-is-reasoning-model")
    | rows(
        Kind.REFUSED,
        "`config.json` is read from the model's folder; `--hf-overrides` changes its fields",
        "--hf-config-path",
    )
    | rows(
        Kind.REFUSED,
        "a quantized checkpoint's `config.json` has its settings, and `--quantization fp8` has none",
        "--quantization-config --allow-deprecated-quantization",
    )
    | rows(
        Kind.REFUSED,
        "which layers have a window is read from the model",
        "--disable-sliding-window",
    )
    | rows(
        Kind.REFUSED,
        "layers with windows and with states always have blocks of their own",
        "--disable-hybrid-kv-cache-manager",
    )
    | rows(Kind.REFUSED, "all layers have one type of KV cache", "--kv-cache-dtype-skip-layers")
    | rows(
        Kind.REFUSED,
        "blocks are named by one hash, of 128 bits",
        "--prefix-caching-hash-algo",
    )
    | rows(
        Kind.REFUSED,
        "the prefix cache matches whole blocks and chooses its checkpoints itself",
        "--prefix-cache-retention-interval --prefix-match-unit --swa-bounded-replay --kv-sharing-fast-prefill "
        "--enable-mamba-shared-prefix-checkpoint",
    )
    | rows(
        Kind.REFUSED,
        _STATES,
        "--mamba-backend --mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds "
        "--mamba-block-size --mamba-cache-mode --replayssm-buffer-len --use-replayssm",
    )
    | rows(Kind.REFUSED, _STATES, "--mamba-cache-dtype --mamba-ssm-cache-dtype", ["auto"])
    | rows(
        Kind.REFUSED,
        _OFFLOAD,
        "--cpu-offload-params --offload-backend --offload-group-size --offload-num-in-group --offload-params "
        "--offload-prefetch-step",
    )
    | rows(Kind.REFUSED, _OFFLOAD, "--cpu-offload-gb", ["0"])
    | rows(
        Kind.REFUSED,
        "preempted requests are computed again, or read from host memory with `--kv-offloading-size`",
        "--swap-space --preemption-mode",
        ["0", "recompute"],
    )
    | rows(Kind.REFUSED, _LOAD, "--model-loader-extra-config")
    | rows(
        Kind.REFUSED,
        "`--decode-context-parallel-size` divides the cache in equal runs of each block",
        "--dcp-comm-backend --dcp-q-replicate --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size",
    )
    | rows(Kind.REFUSED, "a prompt's tokens are not divided among ranks", "--prefill-context-parallel-size", ["1"])
    | rows(
        Kind.REFUSED,
        _EXPERTS,
        "--all2all-backend --enable-eplb --eplb-config --expert-placement-strategy --enable-elastic-ep "
        "--elastic-ep-max-dp-size --enable-ep-weight-filter",
    )
    | rows(
        Kind.REFUSED,
        "steps are not divided into smaller batches",
        "--enable-dbo --ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold",
    )
    | rows(
        Kind.REFUSED,
        "how ranks divide and exchange their work is fixed",
        "--enable-hc-sp --enable-batch-sharded-sampling --enable-shm-tensor-arena --ray-workers-use-nsight",
    )
    | rows(
        Kind.REFUSED,
        "ranks wait 30 minutes for each other at start, then as long as a step may take; `--step-timeout` reports a "
        "step that is late",
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds",
    )
    | rows(
        Kind.REFUSED,
        "an engine whose rank is lost ends, and gateways continue its requests on others, see docs/failover.md",
        "--enable-fault-tolerance --fault-tolerance-config",
    )
    | rows(
        Kind.REFUSED,
        "besides `--max-num-batched-tokens` nothing limits a prompt's tokens in a step",
        "--long-prefill-token-threshold",
        ["0"],
    )
    | rows(
        Kind.REFUSED,
        "besides `--max-num-batched-tokens` nothing limits a prompt's tokens in a step",
        "--long-prefill-token-threshold-adaptive --prefill-schedule-interval",
    )
    | rows(Kind.REFUSED, "no share of the KV cache is kept free", "--watermark", ["0"])
    | rows(Kind.REFUSED, "steps are scheduled one by one", "--num-scheduler-steps", ["1"])
    | rows(
        Kind.REFUSED,
        "an image may be computed in chunks",
        "--disable-chunked-mm-input",
    )
    | rows(Kind.REFUSED, "images are files, or data URLs with them", "--enable-mm-embeds")
    | rows(Kind.REFUSED, "files of the server are not read for requests", "--allowed-local-media-path")
    | rows(
        Kind.REFUSED,
        _IMAGES,
        "--media-io-kwargs --mm-processor-kwargs --trust-request-mm-kwargs --mm-processor-device "
        "--mm-device-do-normalize",
    )
    | rows(
        Kind.REFUSED,
        _IMAGE_CACHE,
        "--mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --mm-tensor-ipc "
        "--mm-ipc-gpu-memory-gb --disable-mm-preprocessor-cache --ec-manager-config",
    )
    | rows(
        Kind.REFUSED,
        "the chat template places the images of a message",
        "--interleave-mm-strings",
    )
    | rows(
        Kind.REFUSED,
        "memory for encoding images is always counted",
        "--skip-mm-profiling",
    )
    | rows(Kind.REFUSED, "there are no videos", "--video-pruning-rate --video-pruning-method")
    | rows(
        Kind.REFUSED,
        "images are encoded in the engine that answers",
        "--mm-encoder-only --ec-transfer-config",
    )
    | rows(
        Kind.REFUSED,
        "encoders of images are not quantized",
        "--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin",
    )
    | rows(Kind.REFUSED, "adapters have the type of the model's activations", "--lora-dtype", ["auto"])
    | rows(
        Kind.REFUSED,
        "an adapter's own configuration names the layers that it changes, see docs/adapters.md",
        "--lora-target-modules --enable-tower-connector-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras "
        "--max-lora-cls-labels",
    )
    | rows(Kind.REFUSED, "a request names its adapter as the model", "--default-mm-loras")
    | rows(
        Kind.REFUSED,
        "how adapters are divided among ranks and computed is fixed",
        "--fully-sharded-loras --specialize-active-lora",
    )
    | rows(
        Kind.REFUSED,
        "other adapters than LoRA are not supported",
        "--enable-prompt-adapter",
    )
    | rows(
        Kind.REFUSED,
        _SLEEP,
        "--sleep-mode-backend --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names "
        "--enable-cumem-allocator --enable-nccl-comm-suspend",
    )
    | rows(
        Kind.REFUSED,
        "weights are not exchanged while the engine runs",
        "--weight-transfer-config",
    )
    | rows(
        Kind.REFUSED,
        "responses have no such field",
        "--enable-return-routed-experts --return-sampling-mask --aux-output-config --per-request-spec-decode-metrics",
    )
    | rows(Kind.REFUSED, "`system_fingerprint` is null", "--fingerprint-mode --fingerprint-value", ["none"])
    | rows(
        Kind.REFUSED,
        "tokens are drawn by the request's seed in one way",
        "--use-fp64-gumbel",
    )
    | rows(Kind.REFUSED, "outputs have no watermarks", "--watermark-config")
    | rows(
        Kind.REFUSED,
        "outputs cannot be prescribed",
        "--enable-trace-replay",
    )
    | rows(Kind.REFUSED, "there are no such models", "--diffusion-config --engram-config")
    | rows(
        Kind.REFUSED,
        "`--log-level` and `--log-format`; logs go to standard error, the access log to standard output",
        "--logging-config --log-config-file",
    )
    | rows(
        Kind.REFUSED,
        _NO_TEXTS,
        "--enable-log-outputs",
    )
    | rows(
        Kind.REFUSED,
        "the stacks of unexpected errors are always logged",
        "--log-error-stack",
    )
    | rows(
        Kind.REFUSED,
        _RATE,
        "--show-hidden-metrics-for-version --kv-cache-metrics --kv-cache-metrics-sample --custom-histogram-buckets "
        "--cudagraph-metrics --enable-mfu-metrics --enable-logging-iteration-details",
    )
    | rows(
        Kind.REFUSED,
        "there is no profiler in the engine",
        "--profiler-config --enable-layerwise-nvtx-tracing",
    )
    | rows(
        Kind.REFUSED,
        "kernels are compiled at start; none is watched later",
        "--jit-monitor-mode --jit-monitor-verbose",
    )
    | rows(
        Kind.REFUSED,
        "variables of vLLM are not read",
        "--fail-on-environ-validation",
    )
    | rows(Kind.REFUSED, "the gateway listens on `--host` and `--port`", "--uds")
    | rows(
        Kind.REFUSED,
        "streams have no comments; raise the read timeout of proxies",
        "--sse-keep-alive-interval",
        ["0"],
    )
    | rows(Kind.REFUSED, "the limits of a request's headers are fixed", "--h11-max-header-count")
    | rows(
        Kind.REFUSED,
        "there are no endpoints for rendering alone",
        "--enable-scale-out",
    )
    | rows(
        Kind.REFUSED,
        "besides `--image-threads` the gateway chooses the number of its threads",
        "--renderer-num-workers",
        ["1"],
    )
    | rows(
        Kind.REFUSED,
        "gateway and engine are always processes of their own",
        "--disable-frontend-multiprocessing",
    )
)

TABLE: dict[str, Row] = _SAME | _ACCEPTED | _ELSEWHERE | _REFUSED
