"""The operator's Triton kernels and their launchers; nothing outside this folder imports triton."""
