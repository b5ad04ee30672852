"""The cluster: spec (data), schema (YAML), catalogue (device types), units."""

from hapx.cluster.spec import ClusterSpec, Device, DeviceType, Link, Machine

__all__ = ["ClusterSpec", "Device", "DeviceType", "Link", "Machine"]
