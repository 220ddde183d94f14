# Every task, one word each. `make` alone lists them.
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
export PATH := $(CURDIR)/.venv/bin:$(CURDIR)/.tools/bin:$(PATH)
# Python keeps what it compiles: tests start hundreds of processes, and compiling torch's files takes seconds in each.
unexport PYTHONDONTWRITEBYTECODE

MODEL ?= builtin
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 3
SOAK_ARGS ?=
SPEECH_ARGS ?=
MINUTES ?= 5
AGAINST ?= main
STAGES ?=
OUT ?= build/gpu-report
LIMIT ?= 560
CALL ?=
EARLIER ?=
CAPABILITY ?= 90

##@ Use
# The shell survives Ctrl-C, by which `proa serve` ends: make reports an error if its shell is interrupted.
run: setup ## start an engine and a gateway on this machine (MODEL=builtin PORT=8000 ARGS="--FLAG …", those of `proa serve`); Ctrl-C stops both
	@trap : INT; proa serve "$(MODEL)" --host 127.0.0.1 --port $(PORT) $(ARGS) || [ $$? -eq 130 ]

real-model: setup ## fetch SmolLM2-135M-Instruct (93 MB, once) into build/real-model, for `make run MODEL=build/real-model`
	@scripts/real-model build/real-model

bench: setup ## gateway events a second; Proa and transformers side by side; 64 clients over HTTP
	PYTHONPATH=tests python -m benchmarks.http.sse --streams 1 64 256
	python -m benchmarks.engine.offline --model "$(MODEL)"
	proa serve "$(MODEL)" --host 127.0.0.1 --port $(PORT) -- proa bench serve --port $(PORT) --num-prompts 256 --max-concurrency 64 --random-input-len 16 --random-output-len 64

soak: setup ## 30 minutes of mixed traffic, fails if memory grows (SOAK_ARGS)
	PYTHONPATH=tests python -m benchmarks.http.soak $(SOAK_ARGS)

chaos: setup ## kill and restart engines and gateways under load, compare every answer (MINUTES=5; an hour by hand)
	PYTHONPATH=tests python -m benchmarks.http.chaos --minutes $(MINUTES)

images: ## build both container images (TAG, IMAGE_PREFIX, PYTHON_IMAGE, BUILD_FLAGS)
	@scripts/images

release: setup tools verify-protos chart-checks ## build, check and sign all that is published, from the last commit, into build/release (SIGN_KEY, IMAGES=no)
	@scripts/release

cluster-up: ## create a kind cluster (needs Docker) and load both images
	@scripts/cluster-up

##@ Develop
setup: ## create .venv with the locked dependencies (PYTHON, TORCH_INDEX); does nothing if it is up to date
	@scripts/setup

tools: ## compile helm into .tools if it is not installed
	@scripts/with-tool helm true

test: setup tools ## all checks, unit and integration tests: six to twelve minutes on two cores
	@$(MAKE) -j2 unit lint types imports verify-protos chart-checks

test-all: export PROA_THOROUGH_TESTS = 1
test-all: test system real ## test with more random cases, then the tests that start processes or compile for Hopper, then a real model

# One thread a process: tests share the cores with the processes they start, and torch's idle threads spin. Three
# workers keep two cores busy while tests wait. A worker begins with a third of the tests in their order, so that most
# fixtures of a module are made once.
unit: setup ## only the unit and integration tests (PYTEST_ARGS, WORKERS=3)
	OMP_NUM_THREADS=1 pytest --numprocesses=$(WORKERS) --dist=worksteal $(PYTEST_ARGS)

# Each worker takes whole files: a module's processes are started once. The S3 server is compiled in two minutes.
system: setup ## only the tests that start processes or compile for Hopper (PYTEST_ARGS, WORKERS=3)
	@scripts/with-tool versitygw true
	OMP_NUM_THREADS=1 pytest tests/system --numprocesses=$(WORKERS) --dist=loadfile $(PYTEST_ARGS)

# Workers begin with half of the tests each, of whole files; tests of the other half move to a worker that is done.
real: setup real-model ## SmolLM2 and MiniLM against their libraries: tokens, streams, calls, embeddings (PYTEST_ARGS)
	@scripts/real-model --embedder build/real-embedder
	OMP_NUM_THREADS=1 pytest tests/real --numprocesses=2 --dist=worksteal $(PYTEST_ARGS)

browser: setup ## the chat page in headless Chromium, which must be installed
	proa serve builtin --host 127.0.0.1 --port $(PORT) -- uv run --quiet --no-project --with playwright python tests/browser/chat_page.py --url http://127.0.0.1:$(PORT)

clients: setup ## the clients that people use, against the built-in model (PORT); installs them into build/clients
	proa serve builtin --host 127.0.0.1 --port $(PORT) --enable-tokenizer-info-endpoint -- python tests/peers/clients.py --url http://127.0.0.1:$(PORT)

agents: setup ## Codex, Claude Code, OpenCode, Qwen Code and openai-agents in pinned versions, against the built-in model and a scripted one (AGENTS_ARGS="--only codex"); installs them into AGENTS_CACHE (build/agents, 1.2 GB)
	PYTHONPATH=tests:. python tests/peers/agents.py $(AGENTS_ARGS)

quantizers: setup ## what the quantizers write, against their own perplexity (QUANTIZERS_ARGS); installs them into build/quantizers
	PYTHONPATH=tests:. python tests/peers/quantizers.py $(QUANTIZERS_ARGS)

test-speech: setup ## Whisper tiny.en and base against transformers on recordings, and an hour of speech (SPEECH_ARGS="--minutes 3"); fetches them once (241 MB) into build/real-speech
	@scripts/real-model --speech build/real-speech
	PYTHONPATH=tests OMP_NUM_THREADS=1 python tests/peers/speech.py $(SPEECH_ARGS)

test-gpu: ## GPU tests of kernels, models, engines, with the python3 on PATH (PYTEST_ARGS)
	PYTHONPATH=engine:protos:services/gateway:services/cli:tests:$$PYTHONPATH python3 -m pytest -c tests/gpu/pytest.ini tests/gpu $(PYTEST_ARGS)

gpu-report: ## GPU tests, benchmarks and profiles as JSON and Markdown, with the python3 on PATH (CALL, STAGES, EARLIER, OUT, LIMIT)
	@python3 -m benchmarks.report.gpu_report --out "$(OUT)" --limit $(LIMIT) $(if $(CALL),--call $(CALL)) \
	  $(if $(STAGES),--stages $(STAGES)) $(if $(EARLIER),--earlier $(EARLIER))

gpu-static: setup ## compile all kernels, without a GPU: registers, copies in flight, launches of a step (CAPABILITY=90; 80, 89, 100, 120)
	OMP_NUM_THREADS=1 PYTHONPATH="$$PYTHONPATH:tests" python -m benchmarks.kernels.gpu_static --capability $(CAPABILITY) --out build/gpu-static

lint: setup ## check the style of the code and of the .proto files
	ruff check
	ruff format --check
	buf lint protos

types: setup ## check types (mypy --strict)
	mypy

imports: setup ## check the import rules
	lint-imports --no-cache

verify-protos: setup ## check that the generated contract code is up to date
	scripts/protos --check

breaking: setup ## list incompatible changes of the contract since another version (AGAINST=main)
	buf breaking protos --against ".git#ref=$(AGAINST),subdir=protos"

chart-checks: setup ## lint and render the chart, check its generated files
	scripts/with-tool helm scripts/check-chart

format: setup ## format the code
	ruff check --fix
	ruff format

protos: setup ## generate the contract's code
	scripts/protos

chart-docs: setup ## generate the chart's README and schema from its values.yaml
	scripts/chart-docs

llm-arguments: setup ## generate the typed arguments of the offline LLM from EngineConfig
	scripts/llm-arguments

pages: setup ## write the tables of docs/metrics.md, variables.md and from-vllm.md
	PYTHONPATH="$$PYTHONPATH:tests" python -m support.metrics_page
	PYTHONPATH="$$PYTHONPATH:tests" python -m support.variables_page
	PYTHONPATH="$$PYTHONPATH:tests" python -m support.vllm_page

lock: setup ## rebuild requirements/*.lock after a change of dependencies (UPGRADE=1: the newest versions)
	scripts/lock

e2e: setup ## end-to-end tests on the cluster of KUBECONFIG (PYTEST_ARGS)
	pytest $(if $(filter tests/%,$(PYTEST_ARGS)),,tests/e2e) --timeout=900 $(PYTEST_ARGS)

sweep: setup ## all causal language model types through transformers; writes the list in docs/models.md
	OMP_NUM_THREADS=1 PYTHONPATH="$$PYTHONPATH:tests" python -m support.transformers_sweep

train: setup ## train the built-in model (hours; resumes where it stopped) and export it
	python -m training.train
	python -m training.export

evaluate: setup ## ask the built-in model 200 questions that it was not trained on
	python -m training.evaluate

size: ## lines and function lengths of each package, and what is large to a reader
	@scripts/size

clean: ## remove the environment, the tools and all caches; build/ is kept
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} + -o -name '*.egg-info' -prune -exec rm -rf {} +

help:
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { print "\n" substr($$0, 5) } /^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: run real-model bench soak chaos browser clients agents quantizers images release cluster-up train evaluate setup test test-all tools unit system real test-speech test-gpu gpu-report gpu-static lint types imports verify-protos breaking chart-checks format protos chart-docs llm-arguments pages lock e2e size clean help
