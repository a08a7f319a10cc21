"""The manifests of `deploy/`: rendered, checked, admitted by a real API server, run under."""
