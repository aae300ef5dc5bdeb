// Layers and their forwards.
use crate::error::{checked, made_text, sized, Result};
use crate::{ffi, handle, Alone, Checkpoint, Context, Source, Spec, SpecInfo, View, ViewMut};
use std::marker::PhantomData;
use std::ptr;

/// Options that this crate passes on; 0 is the library's default.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerOptions {
    pub max_tokens: i64,
    pub max_adapter_rank: i64,
    /// The ranks that share the experts, and which this one is: of a context on ranks.
    pub ep_size: i32,
    pub ep_rank: i32,
}

/// The layer has its own copy of the weights.
pub struct Packed(());
/// The layer reads weights where a source had them: the arrays are borrowed as long as it lives.
/// The lifetime neither grows nor shrinks, since a refit may add arrays to those that are read.
pub struct InPlace<'w>(PhantomData<fn(&'w ()) -> &'w ()>);

/// A layer. Without ranks several threads may use it; forwards at the same time need a workspace each.
pub struct Layer<W = Packed, R = Alone> {
    pub(crate) handle: handle::Layer,
    pub info: SpecInfo,
    kind: PhantomData<(W, R)>,
}

// Says that arrays which it reads outlive it, which a handle of C cannot.
impl<W, R> Drop for Layer<W, R> {
    fn drop(&mut self) {}
}

#[derive(Clone, Copy, Debug)]
pub struct Stats {
    pub forwards: i64,
    pub tokens: i64,
    pub num_adapters: i64,
    pub refit_epoch: u64,
    pub gate_rows_with_nan: i64,
}

impl<R> Layer<Packed, R> {
    pub fn new(
        context: &Context<R>,
        spec: &Spec,
        source: &Source,
        options: LayerOptions,
    ) -> Result<Layer<Packed, R>> {
        create(
            context,
            spec,
            source,
            &c_options(options),
            &split_of(options),
        )
    }

    pub fn from_checkpoint(
        context: &Context<R>,
        checkpoint: &Checkpoint,
        index: i64,
        options: LayerOptions,
    ) -> Result<Layer<Packed, R>> {
        let split = split_of(options);
        let options = c_options(options);
        Layer::of(handle::Layer::make(|out| unsafe {
            ffi::conclave_layer_create_from_checkpoint(
                context.handle.0,
                checkpoint.0 .0,
                index,
                &options,
                &split,
                out,
            )
        })?)
    }
}

impl<'w, R> Layer<InPlace<'w>, R> {
    /// Of f32, f16 and bf16 weights, which are not copied.
    pub fn in_place(
        context: &Context<R>,
        spec: &Spec,
        source: &Source<'w>,
        options: LayerOptions,
    ) -> Result<Layer<InPlace<'w>, R>> {
        let split = split_of(options);
        let mut options = c_options(options);
        options.weights = ffi::WEIGHT_USE_IN_PLACE;
        create(context, spec, source, &options, &split)
    }
}

fn c_options(given: LayerOptions) -> ffi::LayerOptions {
    let mut options: ffi::LayerOptions = unsafe { sized() };
    options.max_tokens = given.max_tokens;
    options.max_adapter_rank = given.max_adapter_rank;
    options
}

fn split_of(given: LayerOptions) -> ffi::Parallel {
    let mut split: ffi::Parallel = unsafe { sized() };
    split.ep_size = given.ep_size;
    split.ep_rank = given.ep_rank;
    split
}

fn create<W, R>(
    context: &Context<R>,
    spec: &Spec,
    source: &Source,
    options: &ffi::LayerOptions,
    split: &ffi::Parallel,
) -> Result<Layer<W, R>> {
    Layer::of(handle::Layer::make(|out| unsafe {
        ffi::conclave_layer_create(
            context.handle.0,
            spec.0 .0,
            source.handle.0,
            options,
            split,
            out,
        )
    })?)
}

impl<W, R> Layer<W, R> {
    fn of(handle: handle::Layer) -> Result<Layer<W, R>> {
        let spec = handle::Spec::make(|out| unsafe { ffi::conclave_layer_spec(handle.0, out) })?;
        Ok(Layer {
            info: Spec(spec).info()?,
            handle,
            kind: PhantomData,
        })
    }

    pub fn spec(&self) -> Result<Spec> {
        let make = |out| unsafe { ffi::conclave_layer_spec(self.handle.0, out) };
        Ok(Spec(handle::Spec::make(make)?))
    }

    pub fn forward(&self, call: Call) -> Result<()> {
        let mut args: ffi::ForwardArgs = unsafe { sized() };
        args.hidden = &call.hidden.tensor;
        args.out = &call.out.tensor;
        args.router_logits = read(&call.logits);
        args.topk_ids = read(&call.ids);
        args.topk_weights = read(&call.weights);
        args.captured_ids = written(&call.captured_ids);
        args.captured_weights = written(&call.captured_weights);
        args.adapter_ids = read(&call.adapter_ids);
        args.adapter = call
            .adapter
            .as_ref()
            .map_or(ptr::null(), |id| id as *const i32);
        args.workspace = call
            .workspace
            .map_or(ptr::null_mut(), |workspace| workspace.0 .0);
        checked(unsafe { ffi::conclave_layer_forward(self.handle.0, &args) })
    }

    pub fn stats(&self) -> Result<Stats> {
        let mut stats: ffi::LayerStats = unsafe { sized() };
        checked(unsafe { ffi::conclave_layer_get_stats(self.handle.0, &mut stats) })?;
        Ok(Stats {
            forwards: stats.forwards,
            tokens: stats.tokens,
            num_adapters: stats.num_adapters,
            refit_epoch: stats.refit_epoch,
            gate_rows_with_nan: stats.gate_rows_with_nan,
        })
    }

    /// Equal for layers of one plan with equal weights.
    pub fn content_hash(&self) -> Result<u64> {
        let mut hash = 0;
        checked(unsafe { ffi::conclave_layer_content_hash(self.handle.0, &mut hash) })?;
        Ok(hash)
    }

    pub fn explain(&self) -> Result<String> {
        made_text(|text| unsafe { ffi::conclave_layer_explain(self.handle.0, text) })
    }
}

impl<W> Layer<W> {
    /// Memory for forwards of up to `tokens` tokens beside other threads.
    pub fn workspace(&self, context: &Context, tokens: i64) -> Result<Workspace> {
        let mut bytes = 0;
        checked(unsafe { ffi::conclave_layer_workspace_bytes(self.handle.0, tokens, &mut bytes) })?;
        Ok(Workspace(handle::Workspace::make(|out| unsafe {
            ffi::conclave_workspace_create(context.handle.0, bytes, ptr::null_mut(), out)
        })?))
    }
}

/// Scratch memory that one forward at a time uses.
pub struct Workspace(handle::Workspace);

/// What a forward reads and writes. Routing is the layer's own gate, `logits`, or `routing`.
pub struct Call<'a> {
    hidden: View<'a>,
    out: ViewMut<'a>,
    logits: Option<View<'a>>,
    ids: Option<View<'a>>,
    weights: Option<View<'a>>,
    captured_ids: Option<ViewMut<'a>>,
    captured_weights: Option<ViewMut<'a>>,
    adapter_ids: Option<View<'a>>,
    adapter: Option<i32>,
    workspace: Option<&'a mut Workspace>,
}

impl<'a> Call<'a> {
    /// `hidden` and `out` [T, hidden_size].
    pub fn new(hidden: View<'a>, out: ViewMut<'a>) -> Call<'a> {
        Call {
            hidden,
            out,
            logits: None,
            ids: None,
            weights: None,
            captured_ids: None,
            captured_weights: None,
            adapter_ids: None,
            adapter: None,
            workspace: None,
        }
    }
    /// [T, num_logits].
    pub fn logits(self, logits: View<'a>) -> Call<'a> {
        Call {
            logits: Some(logits),
            ..self
        }
    }
    /// Experts and weights of each token, [T, num_slots] both, as of a record.
    pub fn routing(self, ids: View<'a>, weights: View<'a>) -> Call<'a> {
        Call {
            ids: Some(ids),
            weights: Some(weights),
            ..self
        }
    }
    /// Takes the routing down: i32 and f32, [T, num_slots].
    pub fn capture(self, ids: ViewMut<'a>, weights: ViewMut<'a>) -> Call<'a> {
        Call {
            captured_ids: Some(ids),
            captured_weights: Some(weights),
            ..self
        }
    }
    /// One adapter for all tokens.
    pub fn adapter(self, id: i32) -> Call<'a> {
        Call {
            adapter: Some(id),
            ..self
        }
    }
    /// [T]: an adapter for each token, or -1 for none.
    pub fn adapter_ids(self, ids: View<'a>) -> Call<'a> {
        Call {
            adapter_ids: Some(ids),
            ..self
        }
    }
    pub fn workspace(self, workspace: &'a mut Workspace) -> Call<'a> {
        Call {
            workspace: Some(workspace),
            ..self
        }
    }
}

fn read(view: &Option<View>) -> *const ffi::Tensor {
    view.as_ref().map_or(ptr::null(), |view| &view.tensor)
}

fn written(view: &Option<ViewMut>) -> *const ffi::Tensor {
    view.as_ref().map_or(ptr::null(), |view| &view.tensor)
}
