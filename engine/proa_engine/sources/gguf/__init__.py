"""GGUF, llama.cpp's format of model files: a file is read as the folder that it was converted from."""
