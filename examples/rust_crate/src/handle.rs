// Handles end themselves. Those of `shared` may be used by several threads, those of `moved` by one
// at a time: conclave/c/base.h says so of each.

macro_rules! handle {
    (shared $name:ident, $destroy:ident) => {
        handle!(moved $name, $destroy);
        unsafe impl Sync for $name {}
    };
    (moved $name:ident, $destroy:ident) => {
        pub(crate) struct $name(pub(crate) *mut crate::ffi::$name);
        unsafe impl Send for $name {}
        impl $name {
            pub(crate) fn make(
                call: impl FnOnce(*mut *mut crate::ffi::$name) -> crate::ffi::Status,
            ) -> crate::error::Result<$name> {
                let mut handle = std::ptr::null_mut();
                crate::error::checked(call(&mut handle))?;
                Ok($name(handle))
            }
        }
        impl Drop for $name {
            fn drop(&mut self) {
                unsafe { crate::ffi::$destroy(self.0) }
            }
        }
    };
}

handle!(shared Context, conclave_context_destroy);
handle!(shared Checkpoint, conclave_checkpoint_destroy);
handle!(shared Spec, conclave_spec_destroy);
handle!(shared Source, conclave_source_destroy);
handle!(shared Layer, conclave_layer_destroy);
handle!(moved Workspace, conclave_workspace_destroy);
handle!(shared LoraCheckpoint, conclave_lora_checkpoint_destroy);
handle!(moved Communicator, conclave_communicator_destroy);
handle!(moved Conversion, conclave_conversion_destroy);
handle!(moved Refit, conclave_refit_destroy);
handle!(shared Recorder, conclave_recorder_destroy);
handle!(shared Replay, conclave_replay_destroy);
