"""All that knows llama.cpp and llama-cpp-python; nothing above imports it."""
