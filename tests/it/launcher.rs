//! What a test puts in the place of a session that runs rows, where the check asks for nothing more than rows and what they left.

/// The methods of `RowLauncher` that no check calls: those that queue launches, and those that name memory of a device.
macro_rules! queues_nothing {
    () => {
        fn cache(&self) -> std::sync::Arc<monobloc::cuda::memory::DeviceBuffer> {
            unreachable!()
        }
        fn pack(&self) -> std::sync::Arc<monobloc::cuda::memory::DeviceBuffer> {
            unreachable!()
        }
        fn queue(
            &mut self,
            _: monobloc::rows::Tables<'_>,
            _: &[monobloc::cuda::rows::RowInput],
            _: bool,
        ) -> Result<(), monobloc::cuda::session::SessionError> {
            unreachable!()
        }
        fn queue_steps(
            &mut self,
            _: monobloc::rows::Tables<'_>,
            _: &[monobloc::cuda::rows::RowInput],
            _: Option<(&mut monobloc::cuda::sampler::SamplerSession, &[monobloc::cuda::sampler::Asked<'_>])>,
        ) -> Result<(), monobloc::cuda::session::SessionError> {
            unreachable!()
        }
        fn choose(
            &mut self,
            _: &mut monobloc::cuda::sampler::SamplerSession,
            _: &[monobloc::cuda::sampler::Asked<'_>],
        ) -> Result<(), monobloc::cuda::session::SessionError> {
            unreachable!()
        }
        fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, monobloc::cuda::session::SessionError> {
            unreachable!()
        }
        fn watched(&self) -> &monobloc::cuda::rows::Watched {
            unreachable!()
        }
        fn finish(&mut self) -> Result<monobloc::cuda::rows::RowsLaunched, monobloc::cuda::session::SessionError> {
            unreachable!()
        }
    };
}
pub(crate) use queues_nothing;
