"""Scaling without Prometheus: the gateway as KEDA's external scaler."""
